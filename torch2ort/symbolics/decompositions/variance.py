"""Variance in plain PyTorch, for the decomposition tables that need it."""

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
    """Compute the sum of the squared distances from the mean divided by ``n - correction``; and the mean.

    Return ``NotImplemented`` where ``n - correction`` may be 0 or less: eager then divides by zero, and
    differentiates as if it had divided by ``n - correction``.
    """
    axes = list(range(self.dim())) if not dim else list(dim)
    count = 1
    for axis in axes:
        count = count * self.shape[axis]
    correction = 1 if correction is None else correction
    # A size that varies is at least two.
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
    """Compute the variance alone, like :func:`var_mean`."""
    both = var_mean(self, dim, correction=correction, keepdim=keepdim)
    return both if both is NotImplemented else both[0]
