"""Scattering."""

from __future__ import annotations

import torch

from torch2ort.symbolics.decompositions.registry import decomposes

aten = torch.ops.aten


@decomposes(aten.scatter_reduce.two)
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
