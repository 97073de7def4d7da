"""Each call of a Function in forward is one call in the graph: none is merged, none is dropped."""

from __future__ import annotations

import copy
from typing import ClassVar

import pytest
import torch
from torch.autograd import Function

import torch2ort
from tests.support.comparison import assert_same, assert_trains_like_eager


class Around(torch.nn.Module):
    """``call`` behind a linear layer."""

    def __init__(self, call) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.call = call

    def forward(self, x):
        return self.call(self.linear(x))


class Noise(Function):
    @staticmethod
    def forward(ctx, x):
        return x + torch.randn_like(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Clamped(Function):
    """Its backward is not linear, so that the gradient of a sum is not the sum of gradients."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-1, 1)


class Counted(Function):
    """Records each call."""

    calls: ClassVar[list[str]] = []

    @staticmethod
    def forward(ctx, x, name="forward"):
        Counted.calls.append(name)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        Counted.calls.append("backward")
        return grad * 3


class Columns(Function):
    """Returns a tensor in column-major order."""

    @staticmethod
    def forward(ctx, x):
        return (x * 2).t().contiguous().t()

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Silent(Function):
    """Returns no tensor."""

    @staticmethod
    def forward(ctx, x):
        return None

    @staticmethod
    def backward(ctx, grad):
        return None


def unread(h):
    Noise.apply(h)
    return Noise.apply(h)


def unread_last(h):
    y = Noise.apply(h)
    Noise.apply(h)
    return y


def two_unread(h):
    Noise.apply(h)
    Clamped.apply(h)
    return h * 2


def unread_kernel(h):
    torch.rand(3)
    return torch.nn.functional.dropout(h) + torch.rand(4)


def unread_kernel_last(h):
    y = torch.nn.functional.dropout(h)
    torch.nn.functional.dropout(h)
    torch.rand(5)
    return y


def read_by_what_nobody_reads(h):
    torch.relu(Noise.apply(h))
    return torch.nn.functional.dropout(h)


CALLS = {
    "noise": lambda h: Noise.apply(h) - Noise.apply(h),
    "clamped": lambda h: Clamped.apply(h) + Clamped.apply(h),
    "in a row": lambda h: Clamped.apply(Clamped.apply(h)) + Clamped.apply(Clamped.apply(h)),
    "kernels": lambda h: h * torch.rand(4) - h * torch.rand(4),
    "dropouts": lambda h: torch.nn.functional.dropout(h) - torch.nn.functional.dropout(h),
    "unread": unread,
    "unread last": unread_last,
    "two unread": two_unread,
    "unread kernel": unread_kernel,
    "unread kernel last": unread_kernel_last,
    "read by an unused result": read_by_what_nobody_reads,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_two_equal_calls_are_two_in_training(call):
    def loss(output):
        # The generator is in the same state as in eager PyTorch.
        return (output * 5).sum() * torch.rand(()).item()

    assert_trains_like_eager(Around(call), [(torch.randn(3, 4),)], lr=0.01, steps=2, loss=loss)


@pytest.mark.parametrize("name", ["noise", "kernels", "unread last", "unread kernel last"])
def test_two_equal_calls_are_two_in_an_export(name, tmp_path):
    model, x = Around(CALLS[name]), torch.randn(3, 4)
    exported = torch2ort.export(model, x, training=True)
    exported.save(tmp_path / "model.onnx")
    loaded = torch2ort.load(tmp_path / "model.onnx", functions=(Noise, Clamped))
    results = []
    for module in (model, exported, loaded):
        torch.manual_seed(7)
        results.append((module(x).detach(), torch.rand(1)))
    assert_same(results[1], results[0], "exported")
    assert_same(results[2], results[0], "loaded")


def test_outputs_keep_their_places_where_one_becomes_the_calls_result():
    def call(h):
        result = Counted.apply(h)
        return result * 1, h + 1, result * 1

    model, x = Around(call).eval(), torch.randn(3, 4)
    exported = torch2ort.export(model, x)
    for actual, expected in zip(exported(x), model(x), strict=True):
        assert_same(actual, expected.detach(), "output")


def test_every_call_has_a_node_of_its_own():
    def call(h):
        for _ in range(5):
            h = h + Clamped.apply(torch.ones(4)) + Clamped.apply(torch.ones(4))
        return h

    exported = torch2ort.export(Around(call).eval(), torch.randn(3, 4))
    assert len(exported.python_ops) == 10


@pytest.mark.parametrize("training", [True, False])
def test_a_call_whose_result_nobody_reads_runs_once_a_step(training, monkeypatch):
    def call(h):
        Counted.apply(h)
        return torch.relu(h)

    model = Around(call).train(training)
    wrapped = torch2ort.ORTModule(copy.deepcopy(model))
    wrapped(torch.randn(3, 4))
    seen = []
    for module in (model, wrapped):
        monkeypatch.setattr(Counted, "calls", [])
        for _ in range(2):
            module(torch.randn(3, 4)).sum().backward()
        seen.append(Counted.calls)
    assert seen[1] == seen[0] == ["forward", "forward"]


def test_a_call_that_gives_no_tensor_is_refused():
    def call(h):
        Silent.apply(h)
        return h

    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.export(Around(call), torch.randn(3, 4))
    assert str(caught.value) == (
        f"{__name__}.Silent: the call returns no tensor, so nothing in a graph depends on it and it would "
        f"not run. Have forward return a tensor, such as its argument's clone(), or call it outside of the "
        f"model"
    )


def test_dropout_of_a_functions_result_draws_in_the_order_of_its_memory():
    assert_trains_like_eager(
        torch.nn.Sequential(torch.nn.Linear(4, 4), Around(Columns.apply), torch.nn.Dropout(0.5)),
        [(torch.randn(3, 4, requires_grad=True),)],
        steps=2,
    )
