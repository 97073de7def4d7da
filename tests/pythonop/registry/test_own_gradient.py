"""``gradient="function"``: operators in files, the Function's own backward in training."""

from __future__ import annotations

import pytest
import torch

import torch2ort
from tests.support.comparison import assert_trains_like_eager


class Spike(torch.autograd.Function):
    """A step with a surrogate gradient, which no operator has."""

    @staticmethod
    def forward(ctx, x, slope):
        ctx.save_for_backward(x)
        ctx.slope = slope
        return (x > 0).float()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / (ctx.slope * x.abs() + 1) ** 2, None


class Round(torch.autograd.Function):
    """Has a ``setup_context``, a tensor and a weight."""

    @staticmethod
    def forward(x, scale):
        return torch.round(x / scale) * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, scale = inputs
        ctx.save_for_backward(x, scale, output)

    @staticmethod
    def backward(ctx, grad):
        x, scale, output = ctx.saved_tensors
        return grad.clone(), (grad * (output - x) / scale).sum()


class Parts(torch.autograd.Function):
    """Two outputs, of which a model may use one; it sets materialize_grads itself."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return torch.floor(x), None, x * 2

    @staticmethod
    def backward(ctx, floor, _, double):
        return (0 if floor is None else floor * 0.5 + 1) + (0 if double is None else double * 3 + 1)


class Around(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.scale = torch.nn.Parameter(torch.tensor(0.1))
        self.last = torch.nn.Linear(4, 2)
        self._call = call

    def forward(self, x):
        return self.last(self._call(self, self.first(x)))


def trains(call):
    return assert_trains_like_eager(Around(call), [(torch.randn(5, 4, requires_grad=True),)], steps=5)


@pytest.fixture(autouse=True)
def _mapped():
    torch2ort.register_exporter(
        Spike,
        lambda g, x, slope: g.op("Cast", g.op("Greater", x, 0), to=torch.float32),
        gradient="function",
    )
    torch2ort.register_exporter(
        Round, lambda g, x, s: g.op("Mul", g.op("Round", g.op("Div", x, s)), s), gradient="function"
    )
    torch2ort.register_exporter(
        Parts, lambda g, x: (g.op("Floor", x), g.op("Mul", x, 2)), gradient="function"
    )


def test_a_surrogate_gradient_is_kept_though_operators_have_none():
    trains(lambda self, x: Spike.apply(x, 5.0))


def test_a_weight_gets_the_functions_gradient():
    trains(lambda self, x: Round.apply(x, self.scale))


def test_two_outputs_of_which_one_is_used():
    trains(lambda self, x: Parts.apply(x)[0])


def test_missing_gradients_stay_missing_where_the_function_asks_for_that():
    trains(lambda self, x: Parts.apply(x)[2])


def test_inference_needs_no_function(tmp_path):
    model, x = Around(lambda self, x: Spike.apply(x, 5.0)).eval(), torch.randn(5, 4)
    exported = torch2ort.export(model, x)
    assert exported.python_ops == ()
    torch.testing.assert_close(exported(x), model(x))


def test_an_export_for_training_runs_after_a_reload(tmp_path):
    model, x = Around(lambda self, x: Spike.apply(x, 5.0)).train(), torch.randn(5, 4)
    torch2ort.export(model, x).save(tmp_path / "model.onnx")
    loaded = torch2ort.load(tmp_path / "model.onnx", functions=[Spike])
    torch.testing.assert_close(loaded(x), model(x))


class Writes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_a_forward_that_writes_to_its_argument_trains_like_eager():
    torch2ort.register_exporter(Writes, lambda g, x: g.op("Add", x, 1), gradient="function")
    trains(lambda self, x: Writes.apply(x))
