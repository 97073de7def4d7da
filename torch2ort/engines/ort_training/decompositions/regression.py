"""Losses between numbers."""

from __future__ import annotations

import torch

from torch2ort.engines.ort_training.decompositions.table import decomposes
from torch2ort.symbolics.decompositions.regression import MEAN, huber_loss, mse_loss, reduced

aten = torch.ops.aten
decomposes(aten.mse_loss.default)(mse_loss)
decomposes(aten.huber_loss.default)(huber_loss)


@decomposes(aten.l1_loss.default)
def l1_loss(self: torch.Tensor, target: torch.Tensor, reduction: int = MEAN) -> torch.Tensor:
    """The absolute difference."""
    return reduced((self - target).abs(), reduction)


@decomposes(aten.smooth_l1_loss.default)
def smooth_l1_loss(
    self: torch.Tensor, target: torch.Tensor, reduction: int = MEAN, beta: float = 1
) -> torch.Tensor:
    """Squared below ``beta``, absolute above."""
    if beta == 0:
        return l1_loss(self, target, reduction)
    difference = self - target
    distance = difference.abs()
    squared = difference * difference * (0.5 / beta)
    return reduced(torch.where(distance < beta, squared, distance - 0.5 * beta), reduction)


@decomposes(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    pos_weight: torch.Tensor | None = None,
    reduction: int = MEAN,
) -> torch.Tensor:
    """``(1 - y) * x + (1 + (w - 1) * y) * log(1 + exp(-x))``, by the log of the sigmoid."""
    logs = torch.nn.functional.logsigmoid(self)
    if pos_weight is not None:
        logs = logs * (1 + (pos_weight - 1) * target)
    loss = (1 - target) * self - logs
    return reduced(loss if weight is None else loss * weight, reduction)
