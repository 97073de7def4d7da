"""A model of two layers with a function between them, for tests of the activations that backward saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WIDTH = 128


class TwoLayerModel(nn.Module):
    """``body`` between two layers."""

    def __init__(self, body: Callable[..., Any], normalization: nn.Module | None = None) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 5)
        self.norm = normalization
        self.body = body

    def forward(self, x: torch.Tensor) -> Any:
        """Return ``body`` of the model and the first layer's result."""
        return self.body(self, self.before(x))


class Keep(torch.autograd.Function):
    """Saves its argument, and reads it in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return twice the argument."""
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Return a gradient that is not forward's derivative where the argument is not positive."""
        (x,) = ctx.saved_tensors
        return grad * torch.where(x > 0, 2.0, 2.5)
