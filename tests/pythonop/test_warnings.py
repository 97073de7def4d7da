"""Copies that a map would save are reported; those of torch2ort's own calls are not."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from torch.autograd import Function

import torch2ort
from tests.support.callable_module import CallableModule
from tests.support.comparison import assert_trains_like_eager
from torch2ort import _native


class Doubles(Function):
    """Overwrites its argument with its result."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Square(Function):
    """Saves its result for backward."""

    @staticmethod
    def forward(ctx, x):
        result = x * x
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx, grad):
        x, result = ctx.saved_tensors
        return grad * (2 * x + result * 0.1)


class Triple(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


@pytest.fixture
def declared():
    torch2ort.register_inplace_map(Doubles, forward={0: 0})
    yield
    torch2ort.unregister(Doubles)


def test_an_argument_that_is_written_to_and_returned_is_told_of_once():
    module = torch2ort.ORTModule(CallableModule(lambda model, h: Doubles.apply(h * 3) + 1))

    def train():
        for _ in range(3):
            module(torch.randn(3, 4)).sum().backward()

    with pytest.warns(torch2ort.Torch2OrtWarning) as found:
        train()
    name = f"{__name__}.Doubles"
    assert [str(w.message) for w in found] == [
        f"{name}: output 0 shares memory with argument 0, which was made correct by a copy. To save the "
        f"copy, declare torch2ort.register_inplace_map({name!r}, forward={{0: 0}})"
    ]


def copied_bytes(name: str) -> int:
    sites = [site for site in gc.get_objects() if type(site) is _native.Site]
    return sum(site.copied_bytes for site in sites if site.name == f"{__name__}.{name}")


@pytest.mark.usefixtures("declared")
def test_a_map_saves_the_copy_between_functions():
    module = torch2ort.ORTModule(CallableModule(lambda model, h: torch.tanh(Doubles.apply(Triple.apply(h)))))
    module(torch.randn(3, 4)).sum().backward()
    before = copied_bytes("Doubles") + copied_bytes("Triple")
    module(torch.randn(3, 4)).sum().backward()
    assert copied_bytes("Doubles") + copied_bytes("Triple") == before


@pytest.mark.usefixtures("declared")
def test_what_the_function_before_saved_is_not_written_over():
    def call(model, h):
        return torch.tanh(Doubles.apply(Square.apply(h))) + Square.apply(h)

    wrapped = torch2ort.ORTModule(CallableModule(call))
    reference = CallableModule(lambda model, h: torch.tanh(Square.apply(h) * 2) + Square.apply(h))
    reference.load_state_dict(wrapped.state_dict())
    for _ in range(2):
        x = torch.randn(3, 4)
        for module in (wrapped, reference):
            module.zero_grad()
            module(x).sum().backward()
        torch.testing.assert_close(wrapped.linear.weight.grad, reference.linear.weight.grad)


KERNELS = {
    "LSTM": (torch.nn.LSTM(4, 4), lambda held, h: held(h.unsqueeze(0))[0].squeeze(0)),
    "index_add": (None, lambda held, h: h.index_add(0, torch.tensor([0, 1, 1]), h * 2)),
    "sort": (None, lambda held, h: h.sort(-1)[0]),
}


@pytest.mark.parametrize(("held", "call"), KERNELS.values(), ids=KERNELS)
def test_calls_of_pytorchs_kernels_warn_of_nothing(held, call):
    model = CallableModule(lambda model, h: call(model.held, h), held)
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch2ort.Torch2OrtWarning)
        assert_trains_like_eager(model, [(torch.randn(3, 4),)], steps=2, lr=0.01)
