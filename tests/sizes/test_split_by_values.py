"""A tensor that is split at an index that depends on values, and of which only one part is used."""

from __future__ import annotations

import pytest
import torch

from tests.support.comparison import assert_trains_like_eager


class Part(torch.nn.Module):
    def __init__(self, which) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(4))
        self._which = which

    def forward(self, x, at):
        at = at.item()
        torch._check(at >= 0)
        torch._check(at <= 4)
        return torch.split(x * self.scale, [at, 4 - at], 1)[self._which]


@pytest.mark.parametrize("which", [0, 1])
def test_the_part_that_is_not_used_gets_zeros(which):
    samples = [(torch.randn(3, 4), torch.tensor(at)) for at in (1, 3, 2)]
    assert_trains_like_eager(Part(which), samples, steps=6)
