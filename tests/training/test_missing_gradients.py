"""A Function may omit a gradient: the operators before it get eager PyTorch's gradients."""

from __future__ import annotations

import copy
from typing import ClassVar

import pytest
import torch

import torch2ort
from tests.support.comparison import assert_same, assert_trains_like_eager
from tests.support.functions import Square
from tests.support.sweeps import sample_cases


class LeaveOut(torch.autograd.Function):
    """Its backward returns no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x + 1.0

    @staticmethod
    def backward(ctx, grad):
        return None


class PassNone(torch.autograd.Function):
    """Gets a missing gradient as None, and returns it."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2.0

    @staticmethod
    def backward(ctx, grad):
        return None if grad is None else grad * 2.0


class Sometimes(torch.autograd.Function):
    """Its backward returns a gradient or none, by the sign of forward's input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x + 1.0

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return None if float(x.sum()) > 0 else grad * 1.0


class Told(torch.autograd.Function):
    """Two results, and a gradient that differs for None and zeros; `seen` has the incoming ones."""

    seen: ClassVar[list] = []

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2.0, x * 3.0

    @staticmethod
    def backward(ctx, *grads):
        Told.seen.append([grad is None for grad in grads])
        return sum(torch.full((3, 4), 7.0) if g is None else (i + 2) * g + 1 for i, g in enumerate(grads))


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


@pytest.mark.parametrize("body", sample_cases(BODIES.values(), 2), ids=BODIES)
def test_a_gradient_left_out(body):
    assert_trains_like_eager(Behind(body), [(torch.rand(3, 4, requires_grad=True),)], steps=3, lr=0.01)


def test_a_batch_of_nothing_has_a_gradient_of_zeros():
    model = torch.nn.Linear(4, 4)
    assert_trains_like_eager(model, [(torch.randn(n, 4),) for n in (2, 0)], steps=2, loss=lambda y: y.sum())


NONE_OR_ZEROS = {
    "directly": lambda h: Sometimes.apply(Told.apply(h)[0]),
    "behind an operator": lambda h: Sometimes.apply(Told.apply(h)[0].sin()),
    "behind a kernel of PyTorch's": lambda h: Sometimes.apply(torch.cumprod(Told.apply(h)[0], 0)),
    "behind a Function that takes zeros": lambda h: Sometimes.apply(Square.apply(Told.apply(h)[0])),
    "two in a row": lambda h: Sometimes.apply(Told.apply(Told.apply(h)[1])[0]),
    "beside a gradient": lambda h: (lambda y: Sometimes.apply(y) + y)(Told.apply(h)[0]),
    "twice": lambda h: (lambda y: Sometimes.apply(y) + Sometimes.apply(y))(Told.apply(h)[0]),
    "one of two": lambda h: (lambda a, b: Sometimes.apply(a) + b)(*Told.apply(h)),
    "the other of two": lambda h: (lambda a, b: a + Sometimes.apply(b))(*Told.apply(h)),
}


@pytest.mark.parametrize("body", NONE_OR_ZEROS.values(), ids=NONE_OR_ZEROS)
def test_a_function_that_takes_none_gets_none(body):
    eager = Behind(body)
    wrapped = torch2ort.ORTModule(copy.deepcopy(eager))
    for sign in (-1.0, 1.0, -1.0, 1.0):
        x = sign * torch.rand(3, 4)
        assert_same(gradients(wrapped, x, sum), gradients(eager, x, sum), "gradients")


class Several(Behind):
    """Returns the result of `body` beside another one."""

    def forward(self, x):
        return *self.body(x * self.weight), x * self.other


def gradients(model, x, loss):
    model.zero_grad()
    Told.seen.clear()
    x = x.clone().requires_grad_()
    loss(model(x)).sum().backward()
    return x.grad, [p.grad for p in model.parameters()], list(Told.seen)


class Refuses(torch.autograd.Function):
    """Has no derivative."""

    @staticmethod
    def forward(ctx, x):
        return x * 2.0

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError("has no derivative")


@pytest.mark.parametrize("read", [(0,), (1,), (2,), (0, 2), (0, 1, 2)], ids=str)
def test_a_function_gets_the_gradients_of_what_the_loss_reads(read):
    eager = Several(Told.apply)
    wrapped = torch2ort.ORTModule(copy.deepcopy(eager))
    x = torch.rand(3, 4)

    def loss(outputs):
        return sum(outputs[i] for i in read)

    for _ in range(2):
        assert_same(gradients(wrapped, x, loss), gradients(eager, x, loss), "gradients")


@pytest.mark.parametrize("unread", [Refuses.apply, lambda h: LeaveOut.apply(Told.apply(h)[0])])
def test_a_function_that_the_loss_does_not_reach_has_no_backward(unread):
    eager = Several(lambda h: (h.exp(), unread(h)))
    wrapped = torch2ort.ORTModule(copy.deepcopy(eager))
    x = torch.rand(3, 4)
    found, expected = (gradients(m, x, lambda outputs: outputs[0] + outputs[2]) for m in (wrapped, eager))
    assert_same(found, expected, "gradients")
    assert expected[2] == []


@pytest.mark.parametrize("unread", [torch.sqrt, lambda h: h.norm(dim=1), lambda h: h.log_softmax(0)])
def test_an_unread_output_with_an_infinite_derivative_changes_nothing(unread):
    eager = Several(lambda h: (h.exp(), unread(h)))
    wrapped = torch2ort.ORTModule(copy.deepcopy(eager))
    x = torch.zeros(3, 4)
    found, expected = (gradients(m, x, lambda outputs: outputs[0] + outputs[2]) for m in (wrapped, eager))
    assert_same(found, expected, "gradients")


def test_a_gradient_left_out_that_makes_nan_is_refused():
    wrapped = torch2ort.ORTModule(Behind(lambda h: h + LeaveOut.apply(1.0 / (h * h))))
    with pytest.raises(torch2ort.EngineError) as caught:
        gradients(wrapped, torch.zeros(3, 4), sum)
    assert str(caught.value) == (
        "ORTModule: a gradient has a NaN, which eager PyTorch's may not have: a Function's backward returned "
        "None for an argument that needs a gradient, and the zeros in its place went through an operator "
        "whose derivative is infinite. Detach that argument before the Function"
    )
