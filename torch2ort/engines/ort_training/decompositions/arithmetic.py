"""Powers and products, whose ONNX operators have no gradient or another."""

from __future__ import annotations

import math

import torch

from torch2ort.engines.ort_training.decompositions.table import decomposes
from torch2ort.symbolics.decompositions.arithmetic import whole_power
from torch2ort.symbolics.decompositions.products import add_product

aten = torch.ops.aten


@decomposes(aten.pow.Tensor_Scalar)
def pow_scalar(self: torch.Tensor, exponent: float) -> torch.Tensor:
    """Products and roots where they do."""
    if exponent in (1, 2, 3):
        return whole_power(self, exponent)
    if not self.dtype.is_floating_point:
        return NotImplemented  # type: ignore[no-any-return]
    if exponent == 0.5:
        return torch.sqrt(self)
    if exponent == -1:
        return torch.reciprocal(self)
    return NotImplemented  # type: ignore[no-any-return]


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
    """``self + alpha * mat @ vec``, or what every graph takes for it."""
    if beta != 1:
        return add_product(self, mat, vec, beta=beta, alpha=alpha)
    product = mv(mat, vec)
    return self + (product if alpha == 1 else product * alpha)
