"""Decompositions of random tensors of a size that may vary, drawn like a given tensor of that size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch2ort.program.decomposition_table import decomposes

aten = torch.ops.aten


def _like(size: Sequence[int], dtype: torch.dtype | None, device: torch.device | None) -> torch.Tensor:
    return torch.zeros(size, dtype=dtype or torch.get_default_dtype(), device=device)


@decomposes(aten.rand.default)
def rand(size: Sequence[int], *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    """Call ``rand_like``, which draws the same numbers."""
    return torch.rand_like(_like(size, dtype, device))


@decomposes(aten.randn.default)
def randn(size: Sequence[int], *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    """Call ``randn_like``, which draws the same numbers."""
    return torch.randn_like(_like(size, dtype, device))


@decomposes(aten.randint.default)
def randint(
    high: int, size: Sequence[int], *, dtype: Any = torch.int64, device: Any = None, **_: Any
) -> torch.Tensor:
    """Call ``randint_like``, which draws the same numbers."""
    return torch.randint_like(_like(size, dtype, device), high)


@decomposes(aten.randint.low)
def randint_low(
    low: int, high: int, size: Sequence[int], *, dtype: Any = torch.int64, device: Any = None, **_: Any
) -> torch.Tensor:
    """Call ``randint_like``, which draws the same numbers."""
    return torch.randint_like(_like(size, dtype, device), low, high)
