"""In-place maps never change a value that another operator reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch2ort
from tests.support.comparison import assert_trains_like_eager
from tests.support.functions import Sum
from tests.support.sweeps import sample_cases


class AddInto(torch.autograd.Function):
    """Writes to its first argument, and returns it."""

    @staticmethod
    def forward(ctx, x, y):
        x.add_(y)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.clone()


class View(torch.autograd.Function):
    """Returns a view of its argument, and the gradient as it is."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Rows(torch.autograd.Function):
    """Returns the first rows of its argument."""

    @staticmethod
    def forward(ctx, x):
        ctx.rows = len(x)
        return x[:2]

    @staticmethod
    def backward(ctx, grad):
        return torch.cat([grad, grad.new_zeros(ctx.rows - 2, *grad.shape[1:])])


class TriplesGradient(torch.autograd.Function):
    """Backward writes to the gradient that it gets."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad.mul_(3)


class Saves(torch.autograd.Function):
    """Writes to its argument, and saves it."""

    @staticmethod
    def forward(ctx, x):
        x.relu_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad * (ctx.saved_tensors[0] > 0)


class Two(torch.autograd.Function):
    """Two views of two arguments; a loss may reach one of them alone."""

    @staticmethod
    def forward(ctx, x, y):
        return x.view_as(x), y.view_as(y)

    @staticmethod
    def backward(ctx, first, second):
        return first, second


class Drops(torch.autograd.Function):
    """Has no gradient for its first argument."""

    @staticmethod
    def forward(ctx, x, y):
        return x.view_as(x) * 1, y * 2

    @staticmethod
    def backward(ctx, first, second):
        return None, second


MAPS: dict[Any, dict[str, dict[int, int]]] = {
    AddInto: {"forward": {0: 0}, "backward": {0: 0}},
    View: {"forward": {0: 0}, "backward": {0: 0}},
    Rows: {"forward": {0: 0}},
    TriplesGradient: {"backward": {0: 0}},
    Sum: {"backward": {0: 0}},
    Saves: {"forward": {0: 0}},
    Two: {"forward": {0: 0, 1: 1}, "backward": {0: 0, 1: 1}},
    Drops: {"backward": {0: 0, 1: 1}},
}


@pytest.fixture(autouse=True)
def _declared():
    for function, given in MAPS.items():
        torch2ort.register_inplace_map(function, **given)


class Model(torch.nn.Module):
    """A function between two layers."""

    def __init__(self, body: Callable[[Any, torch.Tensor, torch.Tensor], Any], width: int) -> None:
        super().__init__()
        self.first, self.other = torch.nn.Linear(width, width), torch.nn.Linear(width, width)
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.register_buffer("table", torch.linspace(-1, 1, width))
        self.body = body

    def forward(self, x):
        return self.body(self, torch.tanh(self.first(x)), self.other(x))


def after_a_branch(model, a, b):
    return AddInto.apply(a * 2, b) + torch.where(a > 0, a, b)


BODIES: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], Any]] = {
    "a row": lambda m, a, b: AddInto.apply(AddInto.apply(AddInto.apply(a * 2, b), b), a) * 2,
    "operators between": lambda m, a, b: AddInto.apply(AddInto.apply(a * 2, b).sin() * 3, b) * 2,
    "views in a row": lambda m, a, b: View.apply(View.apply(View.apply(a)) * 2) * b,
    "read later": lambda m, a, b: (lambda t: AddInto.apply(t, b) * t.detach().sin())(a * 2),
    "read by an equal expression": lambda m, a, b: (
        AddInto.apply(a * 2, b) * AddInto.apply(a * 2, a) * (a * 2)
    ),
    "no operation": lambda m, a, b: AddInto.apply(a + 0, b) * a + AddInto.apply(a * 1, b),
    "to the same type": lambda m, a, b: AddInto.apply(a.to(torch.float32).contiguous() + 0, b) + a,
    "a reshape": lambda m, a, b: AddInto.apply((a * 2).reshape(-1), b.reshape(-1)).reshape(a.shape) + a,
    "transposed twice": lambda m, a, b: AddInto.apply((a * 2).mT.mT.clone(), b) + a * 2,
    "a constant": lambda m, a, b: AddInto.apply(torch.ones(5) * 2, b[0, :5]) + AddInto.apply(a * 2, b)[0, :5],
    "a buffer": lambda m, a, b: AddInto.apply(m.table * 1, b[0]) + m.table,
    "a weight": lambda m, a, b: AddInto.apply(m.weight * 1, b[0]) + View.apply(m.weight) * a,
    "a view of a weight": lambda m, a, b: View.apply(m.weight) * a + View.apply(View.apply(m.weight)),
    "itself twice": lambda m, a, b: (lambda t: AddInto.apply(t * 1, t))(a * 2),
    "a view of itself": lambda m, a, b: (lambda t: AddInto.apply(t, t.reshape(t.shape) * 1) + a)(a * 2),
    "a written view": lambda m, a, b: AddInto.apply(View.apply(a * 2) * 1, b) + a,
    "a view, then a write": lambda m, a, b: (lambda t: AddInto.apply(View.apply(t).clone(), b) + t)(a * 2),
    "two views": lambda m, a, b: sum(Two.apply(a * 2, b * 2)) * a,
    "one of two views": lambda m, a, b: Two.apply(a * 2, b * 2)[1] * a,
    "the first rows": lambda m, a, b: Rows.apply(a * 2) * b[:2] + Rows.apply(a.sin())[:1],
    "a residual gradient": lambda m, a, b: (
        (TriplesGradient.apply(a) * 1 + a) * b + TriplesGradient.apply(a).sin()
    ),
    "gradients in a row": lambda m, a, b: TriplesGradient.apply(TriplesGradient.apply(a)) + a * b,
    "a gradient for two": lambda m, a, b: Sum.apply(a, Sum.apply(b, a)) * 2 + View.apply(a),
    "a gradient for two that one writes to": lambda m, a, b: Sum.apply(
        TriplesGradient.apply(a) * 1, TriplesGradient.apply(b) * 1
    ).sin(),
    "no gradient": lambda m, a, b: sum(Drops.apply(a * 2, b)) * 2,
    "saved": lambda m, a, b: Saves.apply(Saves.apply(a * 2) - 0.1) * AddInto.apply(a * 3, b),
    "returned": lambda m, a, b: (View.apply(a), AddInto.apply(b * 2, a), View.apply(View.apply(a * 2))),
    "returned and read": lambda m, a, b: (lambda t: (t, AddInto.apply(t * 1, b), View.apply(t)))(a * 2),
    "a branch": after_a_branch,
}


def batches(width: int) -> list[tuple[torch.Tensor]]:
    return [(torch.randn(n, width),) for n in (4, 6)]


@pytest.mark.parametrize("name", sample_cases(BODIES, 3))
def test_a_map_trains_like_eager(name):
    assert_trains_like_eager(Model(BODIES[name], 5), batches(5), steps=3)


# Memory of that size is donated without a copy.
@pytest.mark.parametrize(
    "name", sample_cases(["a row", "views in a row", "gradients in a row", "saved", "returned"], 2)
)
def test_a_map_of_large_tensors_trains_like_eager(name):
    model = Model(BODIES[name], 6000)
    model.first = model.other = torch.nn.LayerNorm(6000)  # a product of that width takes long
    assert_trains_like_eager(model, batches(6000), steps=3)


@pytest.mark.parametrize("name", sample_cases(BODIES, 3, start=1))
def test_a_map_infers_like_eager(name):
    model = Model(BODIES[name], 5).eval()
    exported = torch2ort.export(model, torch.randn(4, 5))
    for (x,) in batches(5)[:1] * 3:
        torch.testing.assert_close(exported(x), model(x))


def test_two_backwards_of_one_forward_are_alike():
    def gradients(model):
        x = torch.linspace(-1, 1, 20).reshape(4, 5).requires_grad_()
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        first = x.grad.clone()
        loss.backward()
        return first, x.grad

    model = Model(BODIES["a residual gradient"], 5)
    torch.testing.assert_close(gradients(torch2ort.ORTModule(model)), gradients(model))
