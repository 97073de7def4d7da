"""Decompositions of arithmetic operators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from torch2ort._torch import fake_tensors as private
from torch2ort.program.decomposition_table import decomposes

aten = torch.ops.aten


@decomposes(aten.pow.Tensor_Scalar)
def pow_everywhere(self: torch.Tensor, exponent: Any) -> torch.Tensor:
    """Replace powers by products, which wrap as eager's do, and by roots; a negative infinity has no root."""
    if not isinstance(exponent, (int, float)):
        # The number was read out of a tensor at run time.
        return torch.pow(self, torch.scalar_tensor(exponent, dtype=torch.result_type(self, exponent)))
    if self.dtype.is_floating_point:
        return torch.sqrt(self) if exponent == 0.5 else NotImplemented
    if self.dtype is torch.bool or type(exponent) is not int:
        return NotImplemented  # type: ignore[no-any-return]
    return whole_power(self, exponent) if exponent in (1, 2, 3) else NotImplemented


def whole_power(self: torch.Tensor, exponent: float) -> torch.Tensor:
    """Return the first, second or third power, as a product."""
    if exponent == 1:
        return self.clone()
    return self * self if exponent == 2 else self * self * self


@decomposes(aten.rsub.Scalar, aten.rsub.Tensor)
def rsub(self: torch.Tensor, other: float | torch.Tensor, alpha: float = 1) -> torch.Tensor:
    """Return ``other - alpha * x``."""
    if not isinstance(other, torch.Tensor):
        other = torch.full((), other, dtype=torch.result_type(self, other), device=self.device)
    return other - (self if alpha == 1 else self * alpha)


def reduced_axes(self: torch.Tensor, dim: Sequence[int] | None) -> list[int]:
    """Return the axes of a reduction over ``dim``: all axes for None or (), and no axes for a 0-d tensor."""
    return list(dim) if dim and self.dim() else list(range(self.dim()))


@decomposes(aten.mean.default)
def mean(self: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Divide the sum by the number of elements where there may be none: ONNX Runtime's mean of none is 0."""
    return mean_dim(self, None, dtype=dtype)


@decomposes(aten.mean.dim)
def mean_dim(
    self: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Compute :func:`mean` along ``dim``."""
    axes = reduced_axes(self, dim)
    sizes: list[int | torch.SymInt] = [self.shape[axis] for axis in axes]
    if all(map(private.is_never_zero, sizes)):
        return NotImplemented  # type: ignore[no-any-return]
    return self.sum(axes, keepdim, dtype=dtype) / math.prod(sizes)


@decomposes(aten.eye.default, aten.eye.m)
def eye(
    n: int,
    m: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    """Compare row numbers with column numbers."""
    rows, columns = torch.arange(n, device=device), torch.arange(n if m is None else m, device=device)
    return (rows.unsqueeze(1) == columns).to(dtype or torch.get_default_dtype())
