"""Losses between numbers."""

from __future__ import annotations

import torch

from torch2ort.training_files.derivatives.registry import derives

aten = torch.ops.aten
_MEAN, _SUM = 1, 2


@derives(aten.mse_loss.default)
def mse_loss(self: torch.Tensor, target: torch.Tensor, reduction: int = _MEAN) -> torch.Tensor:
    """Squares of differences."""
    difference = self - target
    return _reduced(difference * difference, reduction)


@derives(aten.huber_loss.default)
def huber_loss(
    self: torch.Tensor, target: torch.Tensor, reduction: int = _MEAN, delta: float = 1.0
) -> torch.Tensor:
    """Half of the square near zero, a line beyond."""
    distance = (self - target).abs()
    near, far = 0.5 * distance * distance, delta * (distance - 0.5 * delta)
    return _reduced(torch.where(distance < delta, near, far), reduction)


def _reduced(values: torch.Tensor, reduction: int) -> torch.Tensor:
    if reduction == _MEAN:
        return values.mean()
    return values.sum() if reduction == _SUM else values
