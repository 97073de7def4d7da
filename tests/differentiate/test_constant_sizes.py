"""Sizes that depend on constants of the program."""

from __future__ import annotations

import pytest
import torch

from tests.support.comparison import assert_trains_like_eager
from tests.support.functions import Square


class Then(torch.nn.Module):
    """A layer, and a function of its result."""

    def __init__(self, function) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.function = function

    def forward(self, x):
        return self.function(self, self.layer(x))


def mask(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool)


def quiet(h):
    with torch.no_grad():
        scale = h[mask(0, 1)].sum()
    return h * scale


CONSTANTS = {
    "rows": lambda m, h: h[mask(1, 0)].tanh(),
    "columns": lambda m, h: h[:, mask(1, 0, 1, 1)] * 2,
    "both": lambda m, h: h[torch.tensor([[True, False, True, True], [False, True, False, True]])],
    "none of them": lambda m, h: h[mask(0, 0)],
    "computed": lambda m, h: h[:, torch.arange(4) % 2 == 0],
    "in front of a Function": lambda m, h: Square.apply(h[:, mask(1, 0, 1, 1)]).view(-1),
    "without gradient": lambda m, h: quiet(h),
    "bincount": lambda m, h: torch.bincount(torch.arange(9) % 4) * h,
    "nonzero": lambda m, h: h[:, torch.nonzero(mask(0, 1, 1, 0)).squeeze(1)],
    "repeated": lambda m, h: h.t().repeat_interleave(torch.tensor([2, 0, 1, 1]), 0),
}


@pytest.mark.parametrize("function", CONSTANTS.values(), ids=CONSTANTS)
def test_sizes_that_constants_decide_train_like_eager(function) -> None:
    x = torch.randn(2, 4, requires_grad=True)
    assert_trains_like_eager(Then(function), [(x,)], steps=2)
