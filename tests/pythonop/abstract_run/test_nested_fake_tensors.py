"""Tensors and sizes inside a Function's argument, where neither autograd nor a graph sees them."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import torch2ort
from tests.support.comparison import assert_same, assert_trains_like_eager


class Through(torch.autograd.Function):
    """Calls its argument."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return call(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.call(grad), None


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, held):
        ctx.held = held
        return x * held.scale

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.held.scale, None


class Pair(NamedTuple):
    first: Any
    second: Any


class Rows(torch.autograd.Function):
    """Multiplies by a size inside its argument."""

    @staticmethod
    def forward(ctx, x, held):
        sizes = getattr(held, "__dict__", held)
        ctx.rows = next(iter(sizes.values())) if isinstance(sizes, dict) else sizes[0]
        return x * ctx.rows

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.rows, None


class Model(torch.nn.Module):
    def __init__(self, call) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 3.0))
        self.held = SimpleNamespace(scale=self.scale)
        self.call = call

    def forward(self, x):
        return self.call(self, self.linear(x))


def by_closure(model, x):
    scale = x.detach().mean()
    return Through.apply(x, lambda value: value * scale)


UNSEEN = {
    "of the call": (
        lambda model, x: Scaled.apply(x, SimpleNamespace(scale=x.detach().mean())),
        "Scaled: argument 1.scale",
    ),
    "made of constants": (
        lambda model, x: Scaled.apply(x, SimpleNamespace(scale=torch.ones(4))),
        "Scaled: argument 1.scale",
    ),
    "a parameter": (
        lambda model, x: Scaled.apply(x, SimpleNamespace(scale=model.linear.bias)),
        "Scaled: argument 1.scale",
    ),
    "of a partial": (
        lambda model, x: Through.apply(x, functools.partial(torch.mul, x.detach().mean())),
        "Through: argument 1[0]",
    ),
    "of a closure": (by_closure, "Through: the variable scale of by_closure.<locals>.<lambda>"),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_a_tensor_of_the_call_is_refused(name):
    call, place = UNSEEN[name]
    with pytest.raises(torch2ort.ExportError) as refused:
        torch2ort.ORTModule(Model(call))(torch.randn(3, 4))
    assert str(refused.value) == (
        f"{__name__}.{place} is a tensor that the model computes with; autograd does not see it there, and "
        f"neither can a graph. Pass it as an argument of its own"
    )


SIZES = {
    "size": lambda x: x.shape,
    "namedtuple": lambda x: Pair(x.shape[0], 1),
    "dictionary": lambda x: {"rows": x.shape[0]},
    "object": lambda x: SimpleNamespace(rows=x.shape[0]),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_in_an_argument_are_those_of_the_call(name):
    model = Model(lambda model, x: Rows.apply(x, SIZES[name](x)))
    module = torch2ort.ORTModule(model)
    for rows in (3, 5, 4):
        x = torch.randn(rows, 4)
        assert_same(module(x), model(x), "output")


@pytest.mark.parametrize("held", [lambda model: model, lambda model: model.held], ids=["module", "object"])
def test_what_is_there_before_the_call_is_read_in_each_call(held):
    model = Model(lambda model, x: Scaled.apply(x, held(model)))
    assert_trains_like_eager(model, [(torch.randn(3, 4),) for _ in range(3)], steps=3)
