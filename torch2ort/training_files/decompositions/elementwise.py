"""Elementwise functions without an operator of ONNX, as exact as PyTorch's."""

from __future__ import annotations

from typing import Any

import torch

from torch2ort.training_files.decompositions.registry import derives

aten = torch.ops.aten


@derives(aten.log1p.default)
def log1p(self: torch.Tensor) -> torch.Tensor:
    """Compute ``log(1 + x)``, exact for small numbers: a ratio corrects the rounding of ``1 + x``."""
    whole = 1 + self
    apart = whole - 1
    is_small = apart == 0
    ratio = torch.log(whole) * (self / torch.where(is_small, 1.0, apart).to(self.dtype))
    # For infinity, the ratio would be one of two infinities.
    return torch.where(is_small | (self > _LARGE), torch.where(is_small, self, torch.log(whole)), ratio)


@derives(aten.expm1.default)
def expm1(self: torch.Tensor) -> torch.Tensor:
    """Compute ``exp(x) - 1``, by ``tanh`` where ``exp(x)`` is close to 1."""
    half = torch.tanh(self / 2)
    near = 2 * half / (1 - half)
    return torch.where(self.abs() < 1, near, torch.exp(self) - 1)


@derives(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(self: torch.Tensor, end: torch.Tensor, weight: Any) -> torch.Tensor:
    """Interpolate from the nearer end, as PyTorch does."""
    weights = weight if isinstance(weight, torch.Tensor) else torch.full((), weight, dtype=self.dtype)
    near = self + weights * (end - self)
    return torch.where(weights.abs() < 0.5, near, end - (end - self) * (1 - weights))


@derives(aten.softplus.default)
def softplus(self: torch.Tensor, beta: float = 1, threshold: float = 20) -> torch.Tensor:
    """Compute ``log(1 + exp(beta x)) / beta``; ``x`` itself where ``beta x`` exceeds the threshold."""
    scaled = self * beta
    is_large = scaled > threshold
    small = torch.where(is_large, 0.0, scaled).to(self.dtype)
    return torch.where(is_large, self, log1p(torch.exp(small)) / beta)


@derives(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(self: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the result, and the tensor that PyTorch saves for the derivative: on the CPU ``exp(-|x|)``."""
    kept = torch.exp(-self.abs())
    return torch.clamp(self, max=0) - log1p(kept), kept


@derives(aten.logaddexp.default)
def logaddexp(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Compute the larger number plus the contribution of the smaller one."""
    apart = (self - other).abs()
    added = torch.maximum(self, other) + log1p(torch.exp(-apart))
    return torch.where(self == other, self + 0.6931471805599453, added)


@derives(aten.sgn.default)
def sgn(self: torch.Tensor) -> torch.Tensor:
    """Compute the sign of real numbers."""
    return NotImplemented if self.is_complex() else torch.sign(self)


@derives(aten.xlogy.Tensor)
def xlogy(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Compute ``x log(y)``; zero where ``x`` is zero, unless ``y`` is NaN."""
    product = torch.where(self == 0, 0.0, self * torch.log(other)).to(torch.result_type(self, other))
    return torch.where(torch.isnan(other), other.to(product.dtype), product)


# Beyond it, 1 + x equals x in float32, and nearly so in float64.
_LARGE = 1e9
