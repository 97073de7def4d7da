"""Tensors without axes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import torch2ort
from tests.support.comparison import assert_same, assert_trains_like_eager

CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flip": lambda x: x.flip(0) * 2,
    "flip, from the end": lambda x: x.flip(-1) * 2,
    "flip of no axis": lambda x: x.flip([]) * 2,
}


class Scaled(torch.nn.Module):
    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self._call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._call(x * self.scale)


@pytest.mark.parametrize("call", CASES.values(), ids=CASES)
def test_a_number_is_eagers(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model, x = Scaled(call), torch.tensor(0.7)
    assert_same(torch2ort.export(model, x)(x), model(x), "the number")
    assert_trains_like_eager(model, [(x,)], steps=1)
