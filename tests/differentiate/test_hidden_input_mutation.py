"""Writes that autograd does not see, into arguments that require a gradient."""

from __future__ import annotations

import copy

import pytest
import torch

import torch2ort
from tests.support.comparison import assert_same


class Silent(torch.autograd.Function):
    """Writes into an argument for which it returns no gradient."""

    @staticmethod
    def forward(ctx, h, y):
        y.mul_(2)
        return h * 1

    @staticmethod
    def backward(ctx, grad):
        return grad * 1, None


class Keeps(torch.autograd.Function):
    """Stores a copy of an argument."""

    @staticmethod
    def forward(ctx, h, y):
        ctx.save_for_backward(h, y.clone())
        return h * y

    @staticmethod
    def backward(ctx, grad):
        h, y = ctx.saved_tensors
        return grad * y, (grad * h).sum(0)


def under_no_grad(h, y):
    result = h + y
    with torch.no_grad():
        y.add_(1)
    return result


def through_data(h, y):
    result = h * y.clone()
    y.data.mul_(2)
    return result


def through_a_view_of_detach(h, y):
    result = h + y
    y.detach()[1:].zero_()
    return result


def what_no_derivative_reads(h, y):
    result = h * y.exp()
    with torch.no_grad():
        y.zero_()
    return result


def what_forward_computes(h, y):
    result = h + y
    with torch.no_grad():
        y.copy_(h.mean(0))
    return result


def what_is_read_again_without_gradient(h, y):
    result = h + y
    with torch.no_grad():
        y.add_(1)
        total = y.sum()
    return result, total


def what_is_returned_detached(h, y):
    result = h + y
    with torch.no_grad():
        y.add_(1)
    return result, y.detach() * 1


def what_nobody_reads(h, y):
    with torch.no_grad():
        y.add_(1)
    return h


def inside_a_function(h, y):
    return Silent.apply(h, y)


def behind_a_function(h, y):
    result = Keeps.apply(h, y)
    with torch.no_grad():
        y.add_(1)
    return result


class Writes(torch.nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.body = body

    def forward(self, x, y):
        return self.body(self.layer(x), y)


BODIES = [
    *(under_no_grad, through_data, through_a_view_of_detach, what_no_derivative_reads),
    *(what_forward_computes, what_is_read_again_without_gradient, what_is_returned_detached),
    *(what_nobody_reads, inside_a_function, behind_a_function),
]


def steps(module, x, y, *, through=lambda y: y):
    """Outputs, values of the argument, and gradients of two steps."""
    found = []
    for _ in range(2):
        given = through(y)
        module.zero_grad()
        outputs = module(x, given)
        first = outputs[0] if isinstance(outputs, tuple) else outputs
        first.square().sum().backward()
        gradients = [p.grad for p in module.parameters()]
        found.append((outputs, given.detach().clone(), gradients, None if y.grad is None else y.grad.clone()))
    return found


THROUGH = {"leaf": lambda y: y, "computed": lambda y: y * 1}


# Each body writes to an argument of one kind; the other one is left to `make test-long`.
@pytest.mark.parametrize(
    ("body", "through"),
    [
        pytest.param(
            body, THROUGH[kind], id=f"{body.__name__}, {kind}", marks=[pytest.mark.long] * ((i + j) % 2)
        )
        for i, body in enumerate(BODIES)
        for j, kind in enumerate(THROUGH)
    ],
)
def test_the_write_and_the_gradients_are_eagers(body, through):
    model, x, y = Writes(body), torch.randn(3, 4), torch.randn(4)
    expected = steps(copy.deepcopy(model), x, y.clone().requires_grad_(), through=through)
    actual = steps(torch2ort.ORTModule(model), x, y.clone().requires_grad_(), through=through)
    assert_same(actual, expected, "steps")


def test_sizes_may_vary():
    model = Writes(lambda h, y: under_no_grad(h.sum(1), y))
    module = torch2ort.ORTModule(copy.deepcopy(model))
    for rows in (3, 5, 2):
        x, y = torch.randn(rows, 4), torch.randn(rows)
        expected = steps(model, x, y.clone().requires_grad_())
        assert_same(steps(module, x, y.clone().requires_grad_()), expected, f"{rows} rows")


def test_a_second_backward_reads_the_argument_as_it_was():
    model, x = Writes(what_no_derivative_reads), torch.randn(3, 4)
    found = []
    for module in (model, torch2ort.ORTModule(copy.deepcopy(model))):
        y = torch.arange(4.0, requires_grad=True)
        output = module(x, y)
        output.square().sum().backward(retain_graph=True)
        output.sum().backward()
        found.append([y.grad, *(p.grad for p in module.parameters())])
    assert_same(found[1], found[0], "gradients")
