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


@decomposes(aten.embedding.default)
def embedding(
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """Rows of ``weight``; PyTorch's kernel where some rows count otherwise in backward."""
    if scale_grad_by_freq or padding_idx >= 0:
        return NotImplemented  # type: ignore[no-any-return]
    return weight.index_select(0, indices.flatten()).view(*indices.shape, weight.shape[1])
