"""Spreads of numbers in plain PyTorch, for the tables of those that need them taken apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def var_mean(
    self: torch.Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of the squared distance from the mean, with ``n - correction`` for ``n``; and the mean."""
    axes = list(range(self.dim())) if not dim else list(dim)
    count = 1
    for axis in axes:
        count = count * self.shape[axis]
    average = self.mean(axes, keepdim=True)
    centered = self - average
    free = count - (1 if correction is None else correction)
    variance = (centered * centered).sum(axes, keepdim) / free
    return variance, average if keepdim else average.squeeze(axes)


def var(
    self: torch.Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> torch.Tensor:
    """The variance alone."""
    return var_mean(self, dim, correction=correction, keepdim=keepdim)[0]
