"""What stands between two layers, for tests of what backward keeps of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WIDTH = 128


class Between(nn.Module):
    """What ``body`` makes of a layer's result, in front of another layer."""

    def __init__(self, body: Callable[..., Any], normalization: nn.Module | None = None) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 5)
        self.norm = normalization
        self.body = body

    def forward(self, x: torch.Tensor) -> Any:
        """What the body makes of itself and the first layer's result."""
        return self.body(self, self.before(x))


class Keep(torch.autograd.Function):
    """Keeps its argument, and reads it in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Twice the argument."""
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Not the derivative of forward where the argument is not positive."""
        (x,) = ctx.saved_tensors
        return grad * torch.where(x > 0, 2.0, 2.5)
