"""Decompositions for 0-d tensors, of which eager accepts the axes 0 and -1, and ONNX none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch2ort.program.decomposition_table import decomposes

aten = torch.ops.aten


@decomposes(aten.flip.default)
def flip(self: torch.Tensor, dims: Sequence[int]) -> Any:
    """Return the number itself; there is nothing to flip."""
    del dims
    return NotImplemented if self.dim() else self.clone()


@decomposes(aten.tile.default)
def tile(self: torch.Tensor, dims: Sequence[int]) -> Any:
    """Return the number itself where it is repeated along no axis."""
    return NotImplemented if self.dim() or dims else self.clone()


@decomposes(aten.amax.default, aten.amin.default)
def extreme(self: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
    """Return the number itself."""
    del dim, keepdim
    return NotImplemented if self.dim() else self.clone()


@decomposes(aten.aminmax.default)
def aminmax(self: torch.Tensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    """Return the number itself, twice."""
    del dim, keepdim
    return NotImplemented if self.dim() else (self.clone(), self.clone())


@decomposes(aten.prod.dim_int)
def prod(self: torch.Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """Return the product over all axes of a 0-d tensor."""
    del dim, keepdim
    return NotImplemented if self.dim() else self.prod(dtype=dtype)


@decomposes(aten.any.dim, aten.any.dims)
def any_of(self: torch.Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Any:
    """Reduce a 0-d tensor over all axes."""
    del dim, keepdim
    return NotImplemented if self.dim() else self.any()


@decomposes(aten.all.dim, aten.all.dims)
def all_of(self: torch.Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Any:
    """Reduce a 0-d tensor over all axes."""
    del dim, keepdim
    return NotImplemented if self.dim() else self.all()


@decomposes(aten.topk.default)
def topk(self: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """Return the number itself, and its index 0."""
    del dim, largest, sorted
    return (
        NotImplemented if self.dim() or k != 1 else (self.clone(), torch.zeros_like(self, dtype=torch.int64))
    )


@decomposes(aten.linalg_vector_norm.default)
def vector_norm(
    self: torch.Tensor,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """Reshape a 0-d tensor to a vector, and name every axis where all are reduced and kept."""
    if dim and not self.dim():
        return torch.linalg.vector_norm(self.reshape(1), ord, [0], dtype=dtype)
    if keepdim and self.dim() and not dim:
        return torch.linalg.vector_norm(self, ord, list(range(self.dim())), True, dtype=dtype)
    return NotImplemented
