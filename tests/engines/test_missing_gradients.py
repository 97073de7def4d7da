"""A Function may leave a gradient out: what stands before it gets what eager PyTorch gives it."""

from __future__ import annotations

import pytest
import torch

from tests.support.comparison import assert_trains_like_eager
from tests.support.functions import Square


class LeaveOut(torch.autograd.Function):
    """Its backward gives no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x + 1.0

    @staticmethod
    def backward(ctx, grad):
        return None


class PassNone(torch.autograd.Function):
    """Takes a missing gradient as None, and gives it on."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2.0

    @staticmethod
    def backward(ctx, grad):
        return None if grad is None else grad * 2.0


class Behind(torch.nn.Module):
    """A weight in front of ``body``, and one that always has a gradient."""

    def __init__(self, body) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.other = torch.nn.Parameter(torch.ones(4))
        self.body = body

    def forward(self, x):
        return self.body(x * self.weight) + x * self.other


BODIES = {
    "an operator takes it": lambda h: LeaveOut.apply(h.sin()),
    "a Function takes it as zeros": lambda h: LeaveOut.apply(Square.apply(h)),
    "an operator hands it to a Function": lambda h: LeaveOut.apply(Square.apply(h).sin()),
    "a kernel of PyTorch's hands it on": lambda h: LeaveOut.apply(torch.cumprod(h, 0)),
    "a Function takes it as None": lambda h: LeaveOut.apply(PassNone.apply(h)),
    "None and zeros": lambda h: LeaveOut.apply(Square.apply(PassNone.apply(h))),
    "zeros and None": lambda h: LeaveOut.apply(PassNone.apply(Square.apply(h))),
    "twice": lambda h: LeaveOut.apply(Square.apply(LeaveOut.apply(h))),
    "a gradient arrives beside it": lambda h: LeaveOut.apply(y := Square.apply(h)) + y,
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_gradient_left_out(body):
    assert_trains_like_eager(Behind(body), [(torch.rand(3, 4, requires_grad=True),)], steps=3, lr=0.01)


def test_a_batch_of_nothing_has_a_gradient_of_zeros():
    model = torch.nn.Linear(4, 4)
    assert_trains_like_eager(model, [(torch.randn(n, 4),) for n in (2, 0)], steps=2, loss=lambda y: y.sum())
