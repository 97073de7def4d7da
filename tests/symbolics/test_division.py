"""Floor division gives eager PyTorch's integer where the quotient itself is rounded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import torch2ort
from tests.support.comparison import assert_same

# 3 / 0.3 is 10 in float32, while 0.3 is in 3 nine times: its float32 is a little more.
NUMBERS = torch.arange(-40.0, 41)
CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "div": lambda x: torch.div(x, 0.3, rounding_mode="floor"),
    "div by a tensor": lambda x: torch.div(x, torch.tensor(0.1), rounding_mode="floor"),
    "floor_divide": lambda x: torch.floor_divide(x, 0.1),
    "brackets": lambda x: x // (x.abs() * 0.1 + 0.1),
    "of an integer": lambda x: x.int() // torch.full((), 0.1),
    "double": lambda x: x.double() // 0.1,
    "div, trunc": lambda x: torch.div(x, 0.3, rounding_mode="trunc"),
    "remainder": lambda x: x % 0.1,
    "remainder of an integer": lambda x: x.int() % torch.full((), 0.1),
    "fmod": lambda x: torch.fmod(x, 0.3),
}


class Division(torch.nn.Module):
    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._call(x)


@pytest.mark.parametrize("call", CASES.values(), ids=CASES)
def test_a_quotient_of_fractions_is_eagers(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    exported = torch2ort.export(Division(call), NUMBERS)
    assert_same(exported(NUMBERS), call(NUMBERS), "the quotients", rtol=0, atol=0)
