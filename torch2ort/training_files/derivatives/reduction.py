"""Spreads of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch2ort.symbolics import operators
from torch2ort.training_files.derivatives.registry import derives

aten = torch.ops.aten


@derives(aten.var.correction)
def var(
    self: torch.Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> torch.Tensor:
    """The mean square of the distance to the mean, of a number less than there are."""
    axes = list(range(self.dim())) if not dim else list(dim)
    centered = self - self.mean(axes, keepdim=True)
    count = math.prod(self.shape[axis] for axis in axes) - (1 if correction is None else correction)
    return (centered * centered).sum(axes, keepdim) / count


@derives(aten.std.correction)
def std(
    self: torch.Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> torch.Tensor:
    """Its root."""
    return torch.sqrt(var(self, dim, correction=correction, keepdim=keepdim))


@derives(operators.extreme)
def extreme(self: torch.Tensor, largest: bool) -> torch.Tensor:
    """The largest or the smallest of all."""
    axes = list(range(self.dim()))
    if not axes:
        return self.clone()
    return self.amax(axes) if largest else self.amin(axes)
