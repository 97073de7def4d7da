"""Decompositions of operators that rearrange elements."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch2ort.program.decomposition_table import decomposes

aten = torch.ops.aten


@decomposes(aten.copy.default)
def copy(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Convert and expand ``src``; the operator has no derivative, and its translation no shape."""
    del non_blocking
    return src.to(self.dtype).expand(self.shape).clone()


@decomposes(aten.squeeze.dim)
def squeeze(self: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the tensor itself where the axis has another size than 1, for which ONNX raises an error."""
    size = self.shape[dim] if self.dim() else 1
    return self if isinstance(size, int) and size != 1 else NotImplemented


@decomposes(aten.squeeze.dims)
def squeeze_dims(self: torch.Tensor, dim: Sequence[int]) -> torch.Tensor:
    """Squeeze one axis after the other, the last one first."""
    for axis in sorted((d % max(self.dim(), 1) for d in dim), reverse=True):
        self = self.squeeze(axis)
    return self.clone() if not dim else self


@decomposes(aten.repeat_interleave.self_int)
def repeat_interleave(
    self: torch.Tensor, repeats: int, dim: int | None = None, *, output_size: int | None = None
) -> torch.Tensor:
    """Expand along a new axis, with all sizes explicit: with no elements, none of them could be inferred."""
    del output_size  # checked by eager during the trace
    if dim is None:
        self, dim = self.reshape(-1), 0
    dim %= self.dim()
    sizes = [*self.shape[:dim], self.shape[dim] * repeats, *self.shape[dim + 1 :]]
    repeated = self.unsqueeze(dim + 1).expand(*self.shape[: dim + 1], repeats, *self.shape[dim + 1 :])
    return repeated.reshape(sizes)


@decomposes(aten.split.Tensor)
def split(self: torch.Tensor, split_size: int, dim: int = 0) -> list[torch.Tensor]:
    """Slice where the size varies, since ONNX's Split could not determine the number of parts."""
    size: int | torch.SymInt = self.shape[dim]
    if isinstance(size, int) and isinstance(split_size, int):
        return NotImplemented  # type: ignore[no-any-return]
    count = int((size + split_size - 1) // split_size)
    ends = [split_size * i for i in range(1, count)] + [size]
    return [aten.slice.Tensor(self, dim, split_size * i, end) for i, end in enumerate(ends)]
