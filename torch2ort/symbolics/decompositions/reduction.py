"""Reductions, whose ONNX operators have no gradient or one that fails on empty tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch2ort.symbolics.decompositions.registry import decomposes

aten = torch.ops.aten


@decomposes(aten.mean.default)
def mean(self: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The sum divided by the number of elements."""
    return self.sum(dtype=dtype) / self.numel()


@decomposes(aten.mean.dim)
def mean_dim(
    self: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The sum over ``dim`` divided by the number of elements."""
    axes = list(range(self.dim())) if not dim else list(dim)
    count = 1
    for axis in axes:
        count = count * self.shape[axis]
    return self.sum(axes, keepdim, dtype=dtype) / count
