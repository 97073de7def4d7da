"""Rearrangements that ONNX has an operator for, but ONNX Runtime no gradient of."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch2ort.symbolics.decompositions.registry import decomposes

aten = torch.ops.aten


@decomposes(aten.squeeze.dims, only_for_gradients=False)
def squeeze_dims(self: torch.Tensor, dim: Sequence[int]) -> torch.Tensor:
    """One axis after the other, the last first."""
    for axis in sorted((d % max(self.dim(), 1) for d in dim), reverse=True):
        self = self.squeeze(axis)
    return self.clone() if not dim else self


@decomposes(aten.copy.default)
def copy(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """The source in the other's dtype and shape; PyTorch's own operator has no derivative."""
    return src.to(self.dtype).expand(self.shape).clone()


@decomposes(aten.split.Tensor, only_for_gradients=False)
def split(self: torch.Tensor, split_size: int, dim: int = 0) -> list[torch.Tensor]:
    """Slices, where the size varies and ONNX's Split could not say how many parts there are."""
    size: int | torch.SymInt = self.shape[dim]
    if isinstance(size, int) and isinstance(split_size, int):
        return NotImplemented  # type: ignore[no-any-return]
    count = int((size + split_size - 1) // split_size)
    ends = [split_size * i for i in range(1, count)] + [size]
    return [aten.slice.Tensor(self, dim, split_size * i, end) for i, end in enumerate(ends)]


@decomposes(aten.pixel_shuffle.default)
def pixel_shuffle(self: torch.Tensor, upscale_factor: int) -> torch.Tensor:
    """Channels into pixels."""
    r = upscale_factor
    *batch, channels, height, width = self.shape
    n = len(batch)
    split = self.reshape(*batch, channels // (r * r), r, r, height, width)
    order = [*range(n), n, n + 3, n + 1, n + 4, n + 2]
    return split.permute(order).reshape(*batch, channels // (r * r), height * r, width * r)


@decomposes(aten.pixel_unshuffle.default)
def pixel_unshuffle(self: torch.Tensor, downscale_factor: int) -> torch.Tensor:
    """Pixels into channels."""
    r = downscale_factor
    *batch, channels, height, width = self.shape
    n = len(batch)
    split = self.reshape(*batch, channels, height // r, r, width // r, r)
    order = [*range(n), n, n + 2, n + 4, n + 1, n + 3]
    return split.permute(order).reshape(*batch, channels * r * r, height // r, width // r)
