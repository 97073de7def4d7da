"""Translations of operators that move, copy or detach tensors, and of some arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import torch

from torch2ort._torch import onnx_exporter as private
from torch2ort.symbolics.graph_builder import constant, op
from torch2ort.symbolics.translations.registry import translates

aten = torch.ops.aten


@translates(aten.detach.default)
def detach(self: ir.Value) -> ir.Value:
    """Copy the values with Identity."""
    return op("Identity", self)


@translates(aten.permute.default)
def permute(self: ir.Value, dims: Sequence[int]) -> ir.Value:
    """Permute dimensions with Transpose."""
    rank = len(dims)
    return op("Transpose", self, perm=[d % rank for d in dims])


def view(self: ir.Value, size: Sequence[int | ir.Value]) -> ir.Value:
    """Reshape with one constant shape where no size varies.

    torch.onnx makes a constant of each size. In a file they become one initializer by folding.
    """
    if all(isinstance(d, int) for d in size):
        return op("Reshape", self, constant(list(size), ir.DataType.INT64), allowzero=1)
    return folded_view(self, size)


def folded_view(self: ir.Value, size: Sequence[int | ir.Value]) -> ir.Value:
    """Use torch.onnx's translation, which does not replace a size of zero by the input's size."""
    translation = private.torchlib_translation(aten.view.default)
    assert translation is not None
    return translation(self, size)  # type: ignore[no-any-return]


@translates(aten.sym_numel.default)
def sym_numel(self: ir.Value) -> ir.Value:
    """Return the number of elements with Size."""
    return op("Size", self)


@translates(aten.pow.Tensor_Scalar)
def pow_scalar(self: ir.Value, exponent: float) -> ir.Value:
    """Convert the exponent to the tensor's type, as the gradient subtracts one from it."""
    if self.dtype is not None and self.dtype.is_floating_point():
        return op("Pow", self, exponent)
    return op("Pow", self, constant(exponent))


@translates(aten.addcmul.default)
def addcmul(self: ir.Value, tensor1: ir.Value, tensor2: ir.Value, value: float = 1) -> ir.Value:
    """Multiply in eager's order, by a factor of the tensors' own type."""
    factor = tensor1 if value == 1 else op("Mul", tensor1, value)
    return op("Add", self, op("Mul", factor, tensor2))


@translates(aten.addcdiv.default)
def addcdiv(self: ir.Value, tensor1: ir.Value, tensor2: ir.Value, value: float = 1) -> ir.Value:
    """Multiply and divide in eager's order: infinity times a quotient that is rounded to zero is NaN."""
    dividend = tensor1 if value == 1 else op("Mul", tensor1, value)
    return op("Add", self, op("Div", dividend, tensor2))


@translates(aten.scalar_tensor.default)
def scalar_tensor(s: float | ir.Value, dtype: int = ir.DataType.FLOAT, **_: object) -> ir.Value:
    """Create the constant in its own type: through float, a double would lose half of its digits."""
    target = ir.DataType(dtype if dtype != -1 else ir.DataType.FLOAT)
    if isinstance(s, ir.Value):
        return op("Cast", s, to=int(target))
    return constant(s, target)


@translates(aten.angle.default)
def angle(self: ir.Value) -> ir.Value:
    """Return pi below zero; for integers, too, for which torch.onnx cuts off the fraction."""
    assert self.dtype is not None
    is_fraction = self.dtype.is_floating_point()
    x = self if is_fraction else op("Cast", self, to=int(ir.DataType.FLOAT), dtype=ir.DataType.FLOAT)
    assert x.dtype is not None
    zero, pi = (constant(np.array(number, x.dtype.numpy())) for number in (0, math.pi))
    found = op("Where", op("Less", x, zero), pi, zero)
    return op("Where", op("IsNaN", x), x, found) if is_fraction else found
