"""Indexing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch2ort.engines.ort_training.decompositions.table import decomposes

aten = torch.ops.aten


@decomposes(aten.flip.default)
def flip(self: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """By indices in reverse order; ONNX's Slice with a negative step has no gradient kernel."""
    if not dims or not self.dim():
        return self.clone()
    for dim in dims:
        size = self.shape[dim]
        self = self.index_select(dim, size - 1 - torch.arange(size, device=self.device))
    return self


@decomposes(aten.scatter_reduce.two)
def scatter_reduce(*_: object, **__: object) -> torch.Tensor:
    """By PyTorch's kernel, see torch2ort.symbolics.policy."""
    return NotImplemented  # type: ignore[no-any-return]
