"""Regression losses."""

from __future__ import annotations

import torch

from torch2ort.training_files.decompositions.registry import derives

aten = torch.ops.aten
_MEAN, _SUM = 1, 2


@derives(aten.mse_loss.default)
def _mse_loss(self: torch.Tensor, target: torch.Tensor, reduction: int = _MEAN) -> torch.Tensor:
    """Compute the squared difference."""
    difference = self - target
    return _reduced(difference * difference, reduction)


@derives(aten.huber_loss.default)
def _huber_loss(
    self: torch.Tensor, target: torch.Tensor, reduction: int = _MEAN, delta: float = 1
) -> torch.Tensor:
    """Compute the Huber loss: squared up to ``delta``, absolute above."""
    difference = self - target
    distance = difference.abs()
    squared = difference * difference * 0.5
    return _reduced(torch.where(distance <= delta, squared, (distance - 0.5 * delta) * delta), reduction)


def _reduced(loss: torch.Tensor, reduction: int) -> torch.Tensor:
    """Apply the reduction of PyTorch's number to a loss."""
    if reduction == _MEAN:
        return loss.mean()
    return loss.sum() if reduction == _SUM else loss
