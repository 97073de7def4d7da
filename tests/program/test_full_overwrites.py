"""The inputs of a tensor that is overwritten as a whole get gradients of zeros, not missing ones."""

from __future__ import annotations

import pytest
import torch

import torch2ort
from tests.support.comparison import assert_trains_like_eager
from tests.support.sweeps import sample_cases


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Halved(torch.autograd.Function):
    """Overwrites its argument, and returns a gradient for it."""

    @staticmethod
    def forward(ctx, h):
        ctx.mark_dirty(h)
        return h.copy_(h / 2)

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


class Around(torch.nn.Module):
    """``write`` gets the results of two layers, and returns the model's result."""

    def __init__(self, write) -> None:
        super().__init__()
        self.layer, self.other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self._write = write

    def forward(self, x):
        return self._write(self.layer(x), self.other(x))


def copied(h, other):
    h.copy_(other)
    return h


def copied_over_itself(h, other):
    return h.copy_(h) * other


def spread_by_a_copy(h, other):
    return h.copy_(other[0])


def assigned(h, other):
    h[:] = other
    return h


def filled(h, other):
    return h.fill_(0.5) * other


def filled_by_a_tensor(h, other):
    return h.fill_(other.sum())


def zeroed_as_a_view(h, other):
    h.view(-1).zero_()
    return h + other


def copied_in_another_order(h, other):
    h.t().copy_(other.t())
    return h


def drawn(h, other):
    return h.normal_(), other.uniform_()


def read_before(h, other):
    read = h * 2
    h.copy_(other)
    return read + h


def of_a_function(h, other):
    return Doubled.apply(h).copy_(other)


def by_a_function(h, other):
    return Halved.apply(h * 1) + other


def of_a_result_of_a_function(h, other):
    h = h * 1
    h.copy_(Doubled.apply(other))
    return h


def twice(h, other):
    return h.zero_().copy_(other)


WRITES = [
    *(copied, copied_over_itself, spread_by_a_copy, assigned, filled, filled_by_a_tensor, zeroed_as_a_view),
    *(copied_in_another_order, drawn, read_before, of_a_function, by_a_function, of_a_result_of_a_function),
    twice,
]


@pytest.mark.filterwarnings("ignore:.*made correct by a copy")
@pytest.mark.parametrize("write", sample_cases(WRITES, 2), ids=lambda write: write.__name__)
def test_what_was_written_over_has_zeros_for_a_gradient(write):
    torch.manual_seed(0)
    batches = [(torch.randn(rows, 4, requires_grad=True),) for rows in (3, 5)]
    assert_trains_like_eager(Around(write), batches, steps=4)


def without_a_gradient(h, other):
    return h.detach().clone().copy_(other)


def into_new_memory(h, other):
    return torch.empty(4).copy_(other[0]) * torch.empty_like(h).zero_()


def one_behind_the_other(h, other):
    buffer = torch.zeros_like(h)
    buffer.copy_(h)
    buffer[0].zero_()
    return buffer * other


@pytest.mark.parametrize(
    "write", [without_a_gradient, into_new_memory, one_behind_the_other], ids=lambda write: write.__name__
)
def test_nothing_but_what_was_computed_of_it_is_joined(write):
    torch.manual_seed(0)
    assert_trains_like_eager(Around(write), [(torch.randn(3, 4, requires_grad=True),)], steps=2)


def test_a_parameter_that_decays_by_zeros_decays_here():
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    model = Around(copied)
    wrapped = torch2ort.ORTModule(model)
    before = model.layer.weight.detach().clone()
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1, weight_decay=0.5)
    wrapped(x).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.layer.weight, before * (1 - 0.1 * 0.5))
