"""Losses between numbers in plain PyTorch, for the tables of those that need them taken apart."""

from __future__ import annotations

import torch

MEAN, SUM = 1, 2


def mse_loss(self: torch.Tensor, target: torch.Tensor, reduction: int = MEAN) -> torch.Tensor:
    """The squared difference."""
    difference = self - target
    return reduced(difference * difference, reduction)


def huber_loss(
    self: torch.Tensor, target: torch.Tensor, reduction: int = MEAN, delta: float = 1
) -> torch.Tensor:
    """Squared up to ``delta``, absolute above."""
    difference = self - target
    distance = difference.abs()
    squared = difference * difference * 0.5
    return reduced(torch.where(distance <= delta, squared, (distance - 0.5 * delta) * delta), reduction)


def reduced(loss: torch.Tensor, reduction: int) -> torch.Tensor:
    """What PyTorch's number for a reduction makes of a loss."""
    if reduction == MEAN:
        return loss.mean()
    return loss.sum() if reduction == SUM else loss
