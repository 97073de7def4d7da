"""A Function that is inlined is exported, and evaluated, as the operators of its forward."""

from __future__ import annotations

import gc
import time

import onnxruntime
import pytest
import torch

import torch2ort
from tests.support.functions import Noisy, Numpy

FACTOR = 3.0


class Scaled(torch.autograd.Function):
    """Has a setup_context, and writes to a tensor of its own."""

    @staticmethod
    def forward(x, weight, factor):
        result = x.clone()
        result.mul_(weight)
        return result * factor

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx, grad):
        raise AssertionError("nobody asks for gradients here")


class Parts(torch.autograd.Function):
    """Several results, one of them a view of an argument."""

    @staticmethod
    def forward(ctx, x):
        return x.sum(-1), x[:, 1:], torch.sign(x).to(torch.int64)

    @staticmethod
    def backward(ctx, *grads):
        raise AssertionError("nobody asks for gradients here")


class Asks(torch.autograd.Function):
    """Computes something else where a gradient is needed."""

    @staticmethod
    def forward(ctx, x):
        return x * 2 if ctx.needs_input_grad[0] else x * 5

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Global(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * FACTOR

    @staticmethod
    def backward(ctx, grad):
        return grad * FACTOR


class Mixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, 7

    @staticmethod
    def backward(ctx, grad, none):
        return grad


FUNCTIONS = (Scaled, Parts, Asks, Global, Numpy, Noisy, Mixed)


class Model(torch.nn.Module):
    def __init__(self, call) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.call = call

    def forward(self, x):
        return self.call(self.linear(x), self.linear.weight[0])


CALLS = {
    "its own memory and a constant": lambda x, weight: Scaled.apply(x, weight, 0.5),
    "several results": lambda x, weight: Parts.apply(x),
    "twice": lambda x, weight: Scaled.apply(Scaled.apply(x, weight, 0.5), weight, 2.0).tanh(),
    "a need of gradients": lambda x, weight: Asks.apply(x),
}
X = torch.randn(3, 4)


@pytest.fixture
def registered():
    for function in FUNCTIONS:
        torch2ort.register_inline(function)
    yield
    for function in FUNCTIONS:
        torch2ort.unregister(function)


EVERY = torch2ort.Options(inline_functions=True)
of_registered = pytest.mark.usefixtures("registered")


@of_registered
@pytest.mark.parametrize("name", CALLS)
def test_an_export_holds_operators_alone(name):
    model = Model(CALLS[name]).eval()
    exported = torch2ort.export(model, X)
    torch.testing.assert_close(exported(X), model(X))
    assert exported.python_ops == ()


@pytest.fixture
def timed_collections():
    """Have the garbage collector run often, and read a clock, as Hypothesis's callback does."""

    def timed(phase, info):
        time.perf_counter()

    threshold = gc.get_threshold()
    gc.callbacks.append(timed)
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*threshold)
    gc.callbacks.remove(timed)


@of_registered
@pytest.mark.usefixtures("timed_collections")
def test_what_the_garbage_collector_calls_is_not_the_functions():
    exported = torch2ort.export(Model(CALLS["twice"]).eval(), X)
    assert exported.python_ops == ()


def test_a_plain_session_runs_the_file(tmp_path):
    model = Model(CALLS["twice"]).eval()
    torch2ort.export(model, X, options=EVERY).save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(X))


@of_registered
def test_an_export_in_training_mode_has_operators_in_the_place_of_calls():
    model = Model(CALLS["twice"]).train()
    exported = torch2ort.export(model, X)
    assert exported.python_ops == ()
    torch.testing.assert_close(exported(X), model(X))


@of_registered
def test_sizes_may_vary():
    model = Model(CALLS["twice"]).eval()
    exported = torch2ort.export(model, X, dynamic_shapes=({0: "rows"},))
    for rows in (2, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(exported(x), model(x))


@of_registered
def test_a_module_in_evaluation_is_eager_pytorch_and_watches_what_forward_reads(monkeypatch):
    model = Model(lambda x, weight: Global.apply(x)).eval()
    module = torch2ort.ORTModule(model)
    with torch.no_grad():
        torch.testing.assert_close(module(X), model(X))
        monkeypatch.setitem(globals(), "FACTOR", 7.0)
        torch.testing.assert_close(module(X), model(X))


@of_registered
def test_an_exporter_of_the_function_goes_before_it():
    @torch2ort.register_exporter(Global)
    def export(g, x):
        return g.op("Neg", x)

    model = Model(lambda x, weight: Global.apply(x)).eval()
    exported = torch2ort.export(model, X)
    torch.testing.assert_close(exported(X), -model.linear(X))


REFUSED = {
    "data": (
        Numpy,
        "PyTorch does not trace it without data (RuntimeError: .numpy() is not supported for tensor "
        "subclasses.)",
    ),
    "random numbers": (Noisy, "its forward draws random numbers"),
    "a number among results": (Mixed, "it returns other values than tensors"),
}


@of_registered
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_inlined_is_refused_by_name(name):
    function, reason = REFUSED[name]

    def call(x, weight):
        result = function.apply(x)
        return result[0] if isinstance(result, tuple) else result

    full = f"{function.__module__}.{function.__name__}"
    with pytest.raises(torch2ort.ExportError) as error:
        torch2ort.export(Model(call).eval(), X)
    assert str(error.value) == (
        f"{full} is registered with register_inline, but {reason}. Take that back with "
        f"torch2ort.unregister('{full}'), so that its calls stay opaque"
    )


def test_an_option_inlines_every_function_that_can_be_and_says_what_cannot(caplog):
    model = Model(lambda x, weight: Numpy.apply(Scaled.apply(x, weight, 0.5))).eval()
    with caplog.at_level("INFO", "torch2ort"):
        exported = torch2ort.export(model, X, options=EVERY)
    torch.testing.assert_close(exported(X), model(X))
    assert [op.func_name for op in exported.python_ops] == ["tests.support.functions.Numpy"]
    assert (
        "tests.support.functions.Numpy stays opaque, as PyTorch does not trace it without data "
        "(RuntimeError: .numpy() is not supported for tensor subclasses.)"
    ) in caplog.messages


def test_an_exporter_goes_before_the_option():
    torch2ort.register_exporter(Global)(lambda g, x: g.op("Neg", x))
    try:
        model = Model(lambda x, weight: Global.apply(x)).eval()
        torch.testing.assert_close(torch2ort.export(model, X, options=EVERY)(X), -model.linear(X))
    finally:
        torch2ort.unregister(Global)


def test_another_body_of_a_function_is_another_graph(tmp_path, monkeypatch):
    options = torch2ort.Options(inline_functions=True, cache_dir=tmp_path)
    model = Model(lambda x, weight: Global.apply(x)).eval()
    for factor in (2.0, 5.0):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        torch.testing.assert_close(torch2ort.export(model, X, options=options)(X), model(X))


def test_an_export_without_the_option_is_another_one(tmp_path):
    model = Model(CALLS["twice"]).eval()
    exported = [
        torch2ort.export(model, X, options=torch2ort.Options(inline_functions=inlines, cache_dir=tmp_path))
        for inlines in (False, True)
    ]
    assert [len(e.python_ops) for e in exported] == [2, 0]
