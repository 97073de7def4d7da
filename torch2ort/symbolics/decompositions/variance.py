"""Spreads of numbers in plain PyTorch, for the tables of those that need them taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def var_mean(
    self: torch.Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Any:
    """The mean of the squared distance from the mean, with ``n - correction`` for ``n``; and the mean.

    ``NotImplemented`` where ``n - correction`` may be none: eager then divides by zero, and differentiates
    as if it had divided by ``n - correction``.
    """
    axes = list(range(self.dim())) if not dim else list(dim)
    count = 1
    for axis in axes:
        count = count * self.shape[axis]
    correction = 1 if correction is None else correction
    # A size that varies is two at least.
    if (count if isinstance(count, int) else 2) <= correction:
        return NotImplemented
    average = self.mean(axes, keepdim=True)
    centered = self - average
    variance = (centered * centered).sum(axes, keepdim) / (count - correction)
    return variance, average if keepdim else average.squeeze(axes)


def var(
    self: torch.Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Any:
    """The variance alone, as :func:`var_mean`."""
    both = var_mean(self, dim, correction=correction, keepdim=keepdim)
    return both if both is NotImplemented else both[0]
