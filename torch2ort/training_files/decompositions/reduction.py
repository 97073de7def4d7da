"""Reductions: variance, standard deviation and extrema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch2ort.program import internal_ops
from torch2ort.symbolics.decompositions.variance import var
from torch2ort.training_files.decompositions.registry import derives

aten = torch.ops.aten
derives(aten.var.correction)(var)


@derives(aten.std.correction)
def std(
    self: torch.Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Any:
    """Compute the square root of the variance."""
    variance = var(self, dim, correction=correction, keepdim=keepdim)
    return variance if variance is NotImplemented else torch.sqrt(variance)


@derives(internal_ops.extreme)
def extreme(self: torch.Tensor, largest: bool) -> torch.Tensor:
    """Compute the largest or the smallest of all elements."""
    axes = list(range(self.dim()))
    if not axes:
        return self.clone()
    return self.amax(axes) if largest else self.amin(axes)
