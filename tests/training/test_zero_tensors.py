"""Zeros for which torch allocates no memory: the derivative of ``sgn``, and Functions that read it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.callable_module import CallableModule
from tests.support.comparison import assert_trains_like_eager


class Signs(nn.Module):
    def __init__(self, *, returns_them):
        super().__init__()
        self.layer, self.returns_them = nn.Linear(4, 4), returns_them

    def forward(self, x):
        h = self.layer(x)
        return h.sgn() if self.returns_them else h


@pytest.mark.parametrize("in_model", [True, False])
def test_the_gradients_are_zeros_as_in_eager(in_model):
    def loss(output):
        return output.sum() if in_model else output.sgn().sum()

    model = Signs(returns_them=in_model)
    assert_trains_like_eager(model, [(torch.randn(3, 4),)], steps=2, loss=loss)


def without_memory(like):
    """Zeros in the form of the derivative of ``sgn``."""
    with torch.enable_grad():
        x = torch.ones_like(like).requires_grad_()
        (zeros,) = torch.autograd.grad(x.sgn().sum(), x)
    assert zeros._is_zerotensor()
    return zeros


class ZeroGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return without_memory(grad)


class ZeroResult(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return without_memory(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


CALLS = {
    "a gradient": lambda model, h: ZeroGradient.apply(h),
    "a result": lambda model, h: ZeroResult.apply(h),
    "a result that goes to a Function": lambda model, h: ZeroGradient.apply(ZeroResult.apply(h)),
    "a gradient that goes to a Function": lambda model, h: ZeroGradient.apply(ZeroResult.apply(h).tanh()),
}


@pytest.mark.parametrize("rows", [3, 20_000], ids=["small", "large"])
@pytest.mark.parametrize("name", CALLS)
def test_a_function_may_give_them(name, rows):
    assert_trains_like_eager(CallableModule(CALLS[name]), [(torch.randn(rows, 4),)], steps=3)
