"""Rearrangements that ONNX has an operator for, but ONNX Runtime no gradient of."""

from __future__ import annotations

import torch

from torch2ort.engines.ort_training.decompositions.table import decomposes

aten = torch.ops.aten


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
