"""Reductions, whose ONNX operators have no gradient or one that fails on empty tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch2ort.engines.ort_training.decompositions.table import decomposes
from torch2ort.symbolics.decompositions.arithmetic import reduced_axes
from torch2ort.symbolics.decompositions.spread import var, var_mean

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
    axes = reduced_axes(self, dim)
    count = 1
    for axis in axes:
        count = count * self.shape[axis]
    return self.sum(axes, keepdim, dtype=dtype) / count


decomposes(aten.var.correction)(var)
decomposes(aten.var_mean.correction)(var_mean)


@decomposes(aten.norm.Scalar, aten.norm.ScalarOpt_dim)
def norm(
    self: torch.Tensor, p: float | None = 2, dim: Sequence[int] | None = None, keepdim: bool = False
) -> torch.Tensor:
    """The newer operator for the same."""
    result: torch.Tensor = torch.linalg.vector_norm(self, 2 if p is None else p, dim or None, keepdim)
    return result


@decomposes(aten._adaptive_avg_pool2d.default)
def adaptive_avg_pool2d(self: torch.Tensor, output_size: Sequence[int]) -> torch.Tensor:
    """A mean for one cell, a pool where the cells are of one size."""
    height, width = self.shape[-2:]
    rows, columns = output_size
    if rows == 1 and columns == 1:
        return self.mean((-2, -1), keepdim=True)
    if not isinstance(height, int) or not isinstance(width, int) or height % rows or width % columns:
        return NotImplemented  # type: ignore[no-any-return]
    kernel = [height // rows, width // columns]
    return torch.nn.functional.avg_pool2d(self, kernel, kernel)
