"""Arithmetic."""

from __future__ import annotations

import math

import torch

from torch2ort.symbolics.decompositions.registry import decomposes

aten = torch.ops.aten


@decomposes(aten.pow.Tensor_Scalar)
def pow_scalar(self: torch.Tensor, exponent: float) -> torch.Tensor:
    """Products and roots where they do."""
    if exponent == 1:
        return self.clone()
    if exponent == 2:
        return self * self
    if exponent == 3:
        return self * self * self
    if not self.dtype.is_floating_point:
        return NotImplemented  # type: ignore[no-any-return]
    if exponent == 0.5:
        return torch.sqrt(self)
    if exponent == -1:
        return torch.reciprocal(self)
    return NotImplemented  # type: ignore[no-any-return]


@decomposes(aten.pow.Tensor_Scalar, only_for_gradients=False)
def pow_everywhere(self: torch.Tensor, exponent: float) -> torch.Tensor:
    """Products, which wrap as eager's do, and roots, which a negative infinity has none of."""
    if self.dtype.is_floating_point:
        return torch.sqrt(self) if exponent == 0.5 else NotImplemented
    if self.dtype is torch.bool or type(exponent) is not int:
        return NotImplemented  # type: ignore[no-any-return]
    return pow_scalar(self, exponent) if exponent in (1, 2, 3) else NotImplemented


@decomposes(aten.pow.Scalar)
def pow_of_number(self: float, exponent: torch.Tensor) -> torch.Tensor:
    """``exp(exponent * log(base))`` for a positive base that is not one."""
    if self <= 0 or self == 1 or not exponent.dtype.is_floating_point:
        return NotImplemented  # type: ignore[no-any-return]
    return torch.exp(exponent * math.log(self))


@decomposes(aten.exp2.default)
def exp2(self: torch.Tensor) -> torch.Tensor:
    """``exp(x * log(2))``."""
    return torch.exp(self * math.log(2))


@decomposes(aten.rsub.Scalar, aten.rsub.Tensor, only_for_gradients=False)
def rsub(self: torch.Tensor, other: float | torch.Tensor, alpha: float = 1) -> torch.Tensor:
    """``other - alpha * x``."""
    if not isinstance(other, torch.Tensor):
        other = torch.full((), other, dtype=torch.result_type(self, other), device=self.device)
    return other - (self if alpha == 1 else self * alpha)


@decomposes(aten.dot.default)
def dot(self: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a product."""
    return (self * tensor).sum()


@decomposes(aten.mv.default)
def mv(self: torch.Tensor, vec: torch.Tensor) -> torch.Tensor:
    """A product with a matrix of one column; ONNX Runtime has no gradient of a product with a vector."""
    return (self @ vec.unsqueeze(1)).squeeze(1)


@decomposes(aten.addmv.default)
def addmv(
    self: torch.Tensor, mat: torch.Tensor, vec: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """``beta * self + alpha * mat @ vec``."""
    product = mv(mat, vec)
    return (self if beta == 1 else self * beta) + (product if alpha == 1 else product * alpha)


@decomposes(aten.eye.default, aten.eye.m, only_for_gradients=False)
def eye(
    n: int,
    m: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    """Ones where the row's number is the column's."""
    rows, columns = torch.arange(n, device=device), torch.arange(n if m is None else m, device=device)
    return (rows.unsqueeze(1) == columns).to(dtype or torch.get_default_dtype())
