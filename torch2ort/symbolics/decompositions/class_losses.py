"""Decompositions of losses over classes."""

from __future__ import annotations

import torch

from torch2ort.program.decomposition_table import decomposes

aten = torch.ops.aten

MEAN, SUM = 1, 2


@decomposes(aten.cross_entropy_loss.default)
def cross_entropy_loss(
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Compute the loss from log_softmax: the kernel of ONNX's own loss does not check the targets."""
    class_axis = 0 if self.dim() == 1 else 1
    if target.dtype.is_floating_point:
        return of_probabilities(self, target, weight, reduction, label_smoothing, class_axis)
    if label_smoothing == 0:
        logs = torch.log_softmax(self, class_axis)
        return nll_loss_forward(logs, target, weight, reduction, ignore_index)[0]
    if self.dim() == 1:
        loss = smoothed(
            self.unsqueeze(0), target.unsqueeze(0), weight, reduction, ignore_index, label_smoothing
        )
        return loss.squeeze(0) if loss.dim() else loss
    return smoothed(self, target, weight, reduction, ignore_index, label_smoothing)


def of_probabilities(
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    label_smoothing: float,
    class_axis: int,
) -> torch.Tensor:
    """Compute the loss of targets that are probabilities of the classes."""
    classes = self.shape[class_axis]
    if label_smoothing > 0:
        target = target * (1 - label_smoothing) + label_smoothing / classes
    logs = torch.log_softmax(self, class_axis)
    if weight is not None:
        logs = logs * _along(weight, self.dim(), class_axis)
    loss = -(logs * target).sum(class_axis)
    if reduction == SUM:
        return loss.sum()
    # PyTorch divides by the number of items, independently of the weights.
    return loss.sum() / (self.numel() // classes) if reduction == MEAN else loss


def smoothed(
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
) -> torch.Tensor:
    """Compute the loss of a batch of class indices with label smoothing."""
    classes = self.shape[1]
    logs = torch.log_softmax(self, 1)
    kept = target != ignore_index
    index = torch.where(kept, target, torch.zeros_like(target))
    picked = logs.gather(1, index.unsqueeze(1)).squeeze(1)
    if weight is None:
        share = kept.to(self.dtype)
        spread = logs.sum(1)
    else:
        share = aten.index(weight, [index]) * kept.to(self.dtype)
        spread = (logs * _along(weight, self.dim(), 1)).sum(1)
    exact = -(picked * share)
    smooth = -(spread * kept.to(self.dtype))
    loss = (1 - label_smoothing) * exact + smooth * (label_smoothing / classes)
    if reduction == MEAN:
        return loss.sum() / share.sum()
    return loss.sum() if reduction == SUM else loss


def _along(weight: torch.Tensor, rank: int, axis: int) -> torch.Tensor:
    return weight.view([-1 if d == axis else 1 for d in range(rank)])


@decomposes(aten.nll_loss.default, aten.nll_loss2d.default, aten.nll_loss_nd.default)
def nll_loss(
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Return minus the picked log probabilities."""
    return nll_loss_forward(self, target, weight, reduction, ignore_index)[0]


@decomposes(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(
    self: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and the sum of the weights of the targets that are not ignored."""
    axis = 0 if self.dim() == 1 else 1
    kept = target != ignore_index
    index = torch.where(kept, target, torch.zeros_like(target))
    picked = self.gather(axis, index.unsqueeze(axis)).squeeze(axis)
    share = kept.to(self.dtype) if weight is None else aten.index(weight, [index]) * kept.to(self.dtype)
    loss = -(picked * share)
    total = share.sum()
    if reduction == MEAN:
        return loss.sum() / total, total
    if reduction == SUM:
        return loss.sum(), total
    return loss, torch.zeros_like(total)
