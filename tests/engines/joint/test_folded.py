"""Sizes that constants of the program decide, and those that only a run tells."""

from __future__ import annotations

import re

import pytest
import torch

import torch2ort
from tests.support.comparison import assert_trains_like_eager
from tests.support.functions import Square
from torch2ort.errors import UnsupportedOperatorError

pytestmark = pytest.mark.joint("it is what is tried")


class Then(torch.nn.Module):
    """A layer, and what a function does with its result."""

    def __init__(self, function) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("held", torch.tensor([True, False]))
        self.function = function

    def forward(self, x):
        return self.function(self, self.layer(x))


def mask(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool)


def written_mask() -> torch.Tensor:
    made = mask(1, 1, 1, 0)
    made[0] = False
    return made


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


UNKNOWN = {
    "of a buffer": lambda m, h: h[m.held],
    "of what is computed": lambda m, h: h[h > 0],
    "of what is written to": lambda m, h: h[:, written_mask()],
}


@pytest.mark.parametrize("function", UNKNOWN.values(), ids=UNKNOWN)
def test_sizes_that_only_a_run_tells_are_refused(function) -> None:
    message = rf"^aten\.index\.Tensor at {re.escape(__file__)}.*, which the joint engine does not take\."
    with pytest.raises(UnsupportedOperatorError, match=message):
        torch2ort.ORTModule(Then(function))(torch.randn(2, 4))
