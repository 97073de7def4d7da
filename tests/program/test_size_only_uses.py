"""Draws and calls of which only the size is used, by the check of an index whose result is unused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import torch2ort


class Counted(torch.autograd.Function):
    """Counts its calls."""

    calls = 0

    @staticmethod
    def forward(ctx, x):
        Counted.calls += 1
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Unread(torch.nn.Module):
    def __init__(self, drawn) -> None:
        super().__init__()
        self._drawn = drawn

    def forward(self, x, y, index):
        self._drawn(x)[index]
        return y * 2


DRAWN = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "rand": lambda x: torch.rand(3),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("drawn", DRAWN.values(), ids=DRAWN)
def test_numbers_are_drawn_as_in_eager(drawn, requires_grad):
    x, y = torch.rand(3, 4, requires_grad=requires_grad), torch.rand(3, 4, requires_grad=requires_grad)
    after = []
    for model in (Unread(drawn), torch2ort.ORTModule(Unread(drawn))):
        torch.manual_seed(0)
        for _ in range(2):
            model(x, y, torch.tensor([2, 0, 1]))
        after.append(torch.rand(2))
    torch.testing.assert_close(after[1], after[0], rtol=0, atol=0)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_function_is_called(requires_grad):
    module = torch2ort.ORTModule(Unread(Counted.apply))
    x, y = torch.rand(3, 4, requires_grad=requires_grad), torch.rand(3, 4, requires_grad=requires_grad)
    module(x, y, torch.tensor([2, 0, 1]))
    before = Counted.calls
    module(x, y, torch.tensor([0, 0, 1]))
    assert Counted.calls == before + 1
