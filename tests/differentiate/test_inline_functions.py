"""A Function that is inlined trains by its own backward, as operators of the graph."""

from __future__ import annotations

import copy

import onnx
import pytest
import torch

import torch2ort
from tests.support.functions import Noisy, Numpy
from tests.support.interpreted_regions import interpret

SLOPE = 2.0


class Lie(torch.autograd.Function):
    """Its backward is not linear, and no derivative of its forward."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return torch.sin(x) * factor

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.abs() * ctx.factor + 1, None


class Scaled(torch.autograd.Function):
    """Writes in place to a tensor of its own; two tensors get gradients."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        result = x.clone()
        result.mul_(weight)
        return result

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight * 2, (grad * x).sum(0)


class Sloped(torch.autograd.Function):
    """Reads a global in backward."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad * SLOPE


class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, first, second):
        return first + second


class Constant(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return torch.ones(3, 4)


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return None


class Model(torch.nn.Module):
    def __init__(self, call) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.call = call

    def forward(self, x):
        return self.call(self.linear(x), self.linear.bias)


def chain(x, weight):
    for factor in (1.0, 2.0, 3.0):
        x = Scaled.apply(Lie.apply(x, factor), weight)
    return x


X = torch.randn(3, 4)


def step(module, x=X):
    module.zero_grad()
    y = module(x)
    y.pow(2).sum().backward()
    return [y.detach(), *(p.grad.clone() for p in module.parameters())]


def calls(folder) -> set[str]:
    """The names of the calls in a step's graphs, PyTorch's kernels excluded."""
    nodes = [n for file in folder.glob("*ward.onnx") for n in onnx.load(file).graph.node]
    names = {a.s.decode() for n in nodes for a in n.attribute if a.name == "func_name"}
    return {name for joined in names for name in joined.split(", ") if not name.startswith("torch2ort.")}


@pytest.fixture
def registered(request):
    """Register classes for the length of a test."""
    for function in (Lie, Scaled):
        torch2ort.register_inline(function)
    yield
    for function in (Lie, Scaled):
        torch2ort.unregister(function)


def on_ort(model, **options):
    return torch2ort.ORTModule(copy.deepcopy(model), options=torch2ort.Options(**options))


def test_a_step_is_that_of_eager_pytorch(registered, tmp_path):
    model = Model(chain)
    torch.testing.assert_close(step(on_ort(model, save_onnx_dir=tmp_path)), step(model))
    assert calls(tmp_path) == set()


def test_with_neighbours_it_becomes_one_region(registered, monkeypatch):
    regions = interpret(monkeypatch)
    model = Model(chain)
    torch.testing.assert_close(step(on_ort(model, fuse=True)), step(model))
    assert len(regions) == 2


def test_sizes_may_vary(registered):
    model = Model(chain)
    module = on_ort(model)
    for rows in (2, 3, 5, 6):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(step(module, x), step(model, x))


def test_an_option_inlines_what_can_be(tmp_path):
    model = Model(lambda x, weight: Noisy.apply(Lie.apply(x, 2.0)))
    seeded = []
    for module in (on_ort(model, save_onnx_dir=tmp_path, inline_functions=True), model):
        torch.manual_seed(3)
        seeded.append(step(module))
    torch.testing.assert_close(*seeded)
    assert calls(tmp_path) == {"tests.support.functions.Noisy"}


def test_with_the_option_a_global_that_backward_reads_is_watched(monkeypatch):
    model = Model(lambda x, weight: Sloped.apply(x))
    module = on_ort(model, inline_functions=True)
    torch.testing.assert_close(step(module), step(model))
    monkeypatch.setitem(globals(), "SLOPE", 5.0)
    torch.testing.assert_close(step(module), step(model))


def test_what_is_not_registered_stays_opaque(tmp_path):
    step(on_ort(Model(chain), save_onnx_dir=tmp_path))
    assert calls(tmp_path) == {f"{__name__}.Lie", f"{__name__}.Scaled"}


def test_a_global_that_backward_reads_is_watched(monkeypatch):
    torch2ort.register_inline(Sloped)
    try:
        model = Model(lambda x, weight: Sloped.apply(x))
        module = on_ort(model)
        torch.testing.assert_close(step(module), step(model))
        monkeypatch.setitem(globals(), "SLOPE", 5.0)
        torch.testing.assert_close(step(module), step(model))
    finally:
        torch2ort.unregister(Sloped)


REFUSED = {
    "data": (
        Numpy,
        "PyTorch does not trace it without data (RuntimeError: .numpy() is not supported for tensor "
        "subclasses.)",
    ),
    "two results": (Two, "it does not return one tensor alone"),
    "random numbers": (Noisy, "its forward draws random numbers"),
    "a gradient of nothing": (
        Constant,
        "its backward returns a gradient that does not depend on the one that arrives",
    ),
    "None": (Nothing, "its backward returns None for tensor 0, which needs a gradient"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_inlined_is_refused_by_name(name):
    function, reason = REFUSED[name]
    torch2ort.register_inline(function)

    def call(x, weight):
        result = function.apply(x)
        return result[0] if isinstance(result, tuple) else result

    full = f"{function.__module__}.{function.__name__}"
    try:
        with pytest.raises(torch2ort.ExportError) as error:
            step(on_ort(Model(call)))
        assert str(error.value) == (
            f"{full} is registered with register_inline, but {reason}. Take that back with "
            f"torch2ort.unregister('{full}'), so that its calls stay opaque"
        )
    finally:
        torch2ort.unregister(function)
