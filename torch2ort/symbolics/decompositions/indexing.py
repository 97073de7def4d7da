"""Indexing and rearranging."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch2ort.symbolics.decompositions.registry import decomposes

aten = torch.ops.aten


@decomposes(aten.flip.default)
def flip(self: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """By indices in reverse order; ONNX's Slice with a negative step has no gradient kernel."""
    for dim in dims:
        size = self.shape[dim]
        self = self.index_select(dim, size - 1 - torch.arange(size, device=self.device))
    return self.clone() if not dims else self


@decomposes(aten.scatter_reduce.two, only_for_gradients=False)
def scatter_reduce(
    self: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    src: torch.Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> torch.Tensor:
    """A mean as a sum divided by a count; ONNX has no mean."""
    if reduce != "mean" or not self.dtype.is_floating_point:
        return NotImplemented  # type: ignore[no-any-return]
    total = self.scatter_reduce(dim, index, src, "sum", include_self=include_self)
    ones, counted = torch.ones_like(self), torch.ones_like(src)
    return total / ones.scatter_reduce(dim, index, counted, "sum", include_self=include_self)


@decomposes(aten.scatter_reduce.two)
def scatter_reduce_for_gradients(*_: object, **__: object) -> torch.Tensor:
    """By PyTorch's kernel, see torch2ort.symbolics.policy."""
    return NotImplemented  # type: ignore[no-any-return]
