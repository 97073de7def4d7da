"""Derivatives that give zeros without memory: that of ``sgn`` in a model, and in a loss of its outputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.comparison import assert_trains_like_eager


class Signs(nn.Module):
    def __init__(self, *, returns_them):
        super().__init__()
        self.layer, self.returns_them = nn.Linear(4, 4), returns_them

    def forward(self, x):
        h = self.layer(x)
        return h.sgn() if self.returns_them else h


@pytest.mark.parametrize("in_model", [True, False])
def test_the_gradients_are_zeros_as_in_eager(in_model):
    def loss(output):
        return output.sum() if in_model else output.sgn().sum()

    model = Signs(returns_them=in_model)
    assert_trains_like_eager(model, [(torch.randn(3, 4),)], steps=2, loss=loss)
