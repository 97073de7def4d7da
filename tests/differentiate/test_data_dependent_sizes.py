"""Sizes that depend on values in tensors: rows that a mask selects, repetitions of rows."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F

import torch2ort
from tests.support.functions import Square


class Model(torch.nn.Module):
    def __init__(self, body):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.register_buffer("held", torch.tensor([True, False, True, True]))
        self.body = body

    def forward(self, x, mask):
        return self.body(self, self.layer(x), mask)


class Positive(torch.autograd.Function):
    """A Function whose number of rows depends on the values of its argument."""

    @staticmethod
    def forward(ctx, x):
        kept = x[:, 0] > 0
        ctx.save_for_backward(x, kept)
        return x[kept] ** 2

    @staticmethod
    def backward(ctx, grad):
        x, kept = ctx.saved_tensors
        return torch.zeros_like(x).index_put((kept,), 2 * x[kept] * grad)


def written(h, mask):
    made = torch.zeros_like(h)
    made[mask] = h[mask].exp()
    return made.square().sum()


def twice(h, mask):
    """Select by a mask that changes after the first selection."""
    mask = mask.clone()
    first = h.detach()[mask].sum()
    mask[0] = ~mask[0]
    return first * h[mask].exp().sum()


BODIES = {
    "the selection itself": lambda m, h, k: h[k],
    "columns": lambda m, h, k: h[:, m.held].tanh().sum(0),
    "numbers": lambda m, h, k: h[h > 0].exp().sum(),
    "masked_select of rows": lambda m, h, k: torch.masked_select(h, k[:, None]).exp().sum(),
    "a layer": lambda m, h, k: m.layer(h[k].relu()).square().sum(),
    "a norm": lambda m, h, k: m.norm(h[k]).exp().sum(),
    "a Function": lambda m, h, k: Square.apply(h[k]).sum(),
    "a Function's": lambda m, h, k: Positive.apply(h).sin(),
    "a loss with one mask": lambda m, h, k: F.cross_entropy(
        h[k], k.long().cumsum(0)[k].clamp(max=3), reduction="sum"
    ),
    "equal masks": lambda m, h, k: (h[h[:, 0] > 0] * h.detach()[h[:, 0] > 0]).exp().sum(),
    "nonzero": lambda m, h, k: h[k.nonzero().squeeze(1)].exp().sum(0),
    "put back": lambda m, h, k: torch.zeros_like(h).index_put((k,), m.layer(h[k])).exp().sum(),
    "written back": lambda m, h, k: written(h, k),
    "a mask that is written to": lambda m, h, k: twice(h, k),
    "added back": lambda m, h, k: (i := k.nonzero()[:, 0], h.index_add(0, i, m.layer(h[i])))[1].exp().sum(),
    "two selections": lambda m, h, k: (h[k].sum(0) * h[~k].exp().sum(0)).sum(),
    "zeros of as many": lambda m, h, k: torch.cat([h[k].new_zeros(h[k].shape[0], 2), h[k].exp()], 1).sum(1),
    "joined": lambda m, h, k: torch.cat([h[k], h[~k].exp(), h[h[:, 0] > 0]]).sum(1),
    "how many": lambda m, h, k: h * (k.nonzero().shape[0] + 1) / (1 + h[k].shape[0] ** 2),
    "a fraction of them": lambda m, h, k: h.sum() * (1 / (h[k].shape[0] + 2)),
    "zeros of as many and two": lambda m, h, k: torch.zeros(h[k].shape[0] + 2).sum() + h,
    "the first two": lambda m, h, k: h[k.nonzero()[:, 0][:2]].exp().sum(0),
    "repeated": lambda m, h, k: h.repeat_interleave(k.long() + 1, 0).square().sum(),
}
# Cases that are similar to others of the table.
ALIKE = frozenset(
    {"a norm", "columns", "equal masks", "joined", "masked_select of rows", "numbers", "put back"}
    | {"a layer", "how many", "repeated", "two selections", "zeros of as many", "zeros of as many and two"}
)
# The number of rows, and a bit mask of the selected ones: a graph for the sizes of one call, one for sizes
# that vary, and selections of all, one and none.
CALLS = ((6, 0b101101), (9, 0b111111111), (7, 0b0000100), (5, 0))


def results(module, calls):
    found = []
    for rows, selected in calls:
        torch.manual_seed(rows)
        x = torch.randn(rows, 4, requires_grad=True)
        mask = torch.tensor([bool(selected >> i & 1) for i in range(rows)])
        module.zero_grad()
        result = module(x, mask)
        (result * torch.arange(1, result.numel() + 1).reshape(result.shape)).sum().backward()
        found += [result, x.grad, *(p.grad for p in module.parameters())]
    return found


def wrapped(model):
    return torch2ort.ORTModule(copy.deepcopy(model))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in ALIKE else ()) for name in BODIES]
)
def test_what_values_select_trains_like_eager(name):
    torch.manual_seed(0)
    model = Model(BODIES[name])
    torch.testing.assert_close(
        results(wrapped(model), CALLS), results(model, CALLS), equal_nan=True, check_stride=False
    )


MEETING = {
    "a product": lambda m, h, k: h[k].sum(1) * h[k.flip(0)].exp().sum(1),
    "a stack": lambda m, h, k: torch.stack([h[k], h[k.flip(0)].exp()]),
    "a tensor of a size": lambda m, h, k: h[k].exp() * torch.arange(1, 5)[:, None],
}


@pytest.mark.parametrize("body", MEETING.values(), ids=MEETING)
def test_selections_of_one_size_meet_like_in_eager(body):
    calls = ((6, 0b101101), (6, 0b110011), (6, 0b111100))
    torch.manual_seed(0)
    model = Model(body)
    torch.testing.assert_close(results(wrapped(model), calls), results(model, calls), check_stride=False)


def test_selections_of_two_sizes_raise_where_one_would_be_broadcast():
    module = wrapped(Model(lambda m, h, k: h[k].exp() * torch.arange(1, 5)[:, None]))
    message = (
        "two sizes that depend on values in tensors are 1 and 4, and the graph of the model is for equal "
        "ones, with nothing broadcast along them. Select tensors of one size with one mask, or put the part "
        "of the model that takes both into a torch.autograd.Function"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        module(torch.randn(4, 4), torch.tensor([False, True, False, False]))


def test_a_dropout_of_such_a_size_is_eagers():
    x, keep = torch.randn(3, 4), torch.tensor([True, False, True])
    model = Model(lambda m, h, k: F.dropout(h[k]))
    gradients = []
    for run in (model, wrapped(model)):
        torch.manual_seed(5)
        run(x, keep).square().sum().backward()
        gradients.append([p.grad for p in run.parameters()])
    torch.testing.assert_close(*gradients)
