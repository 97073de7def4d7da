"""Losses over classes, by ONNX's own where it does."""

from __future__ import annotations

import torch

from torch2ort.engines.ort_training.decompositions.table import decomposes
from torch2ort.symbolics import operators
from torch2ort.symbolics.decompositions.loss import MEAN, SUM, of_probabilities, smoothed

aten = torch.ops.aten


@decomposes(aten.cross_entropy_loss.default)
def cross_entropy_loss(
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Of class indices without smoothing by ONNX's own loss, otherwise written out.

    The loss of no items is written out too: ONNX Runtime's kernel divides by their number.
    """
    class_axis = 0 if self.dim() == 1 else 1
    if target.dtype.is_floating_point:
        return of_probabilities(self, target, weight, reduction, label_smoothing, class_axis)
    if self.dim() == 1:
        loss = cross_entropy_loss(
            self.unsqueeze(0), target.unsqueeze(0), weight, reduction, ignore_index, label_smoothing
        )
        return loss.squeeze(0) if loss.dim() else loss
    if label_smoothing > 0 or any(isinstance(d, int) and d == 0 for d in self.shape):
        return smoothed(self, target, weight, reduction, ignore_index, label_smoothing)
    if reduction != MEAN:
        return _onnx_loss(self, target, weight, reduction, ignore_index)
    # ONNX Runtime's mean over no target at all is zero; PyTorch's is what 0 / 0 is.
    kept = (target != ignore_index).to(self.dtype)
    if weight is not None:
        kept = weight[torch.where(target != ignore_index, target, torch.zeros_like(target))] * kept
    return _onnx_loss(self, target, weight, SUM, ignore_index) / kept.sum().detach()


def _onnx_loss(
    self: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore_index: int
) -> torch.Tensor:
    found: torch.Tensor = operators.cross_entropy(self, target, weight, reduction, ignore_index)
    return found
