"""Operators that move, copy or stop."""

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
    """The same values."""
    return op("Identity", self)


@translates(aten.permute.default)
def permute(self: ir.Value, dims: Sequence[int]) -> ir.Value:
    """Dimensions in another order."""
    rank = len(dims)
    return op("Transpose", self, perm=[d % rank for d in dims])


def view(self: ir.Value, size: Sequence[int | ir.Value]) -> ir.Value:
    """The same elements with another shape, which is one constant where no size varies.

    torch.onnx makes a constant of each size. A file has them as one initializer, once they are folded.
    """
    if all(isinstance(d, int) for d in size):
        return op("Reshape", self, constant(list(size), ir.DataType.INT64), allowzero=1)
    return folded_view(self, size)


def folded_view(self: ir.Value, size: Sequence[int | ir.Value]) -> ir.Value:
    """torch.onnx's translation, which takes no size of zero for that of the input."""
    translation = private.torchlib_translation(aten.view.default)
    assert translation is not None
    return translation(self, size)  # type: ignore[no-any-return]


@translates(aten.sym_numel.default)
def sym_numel(self: ir.Value) -> ir.Value:
    """The number of elements."""
    return op("Size", self)


@translates(aten.pow.Tensor_Scalar)
def pow_scalar(self: ir.Value, exponent: float) -> ir.Value:
    """With the exponent in the tensor's own type, which the gradient subtracts one from."""
    if self.dtype is not None and self.dtype.is_floating_point():
        return op("Pow", self, exponent)
    return op("Pow", self, constant(exponent))


@translates(aten.addcmul.default)
def addcmul(self: ir.Value, tensor1: ir.Value, tensor2: ir.Value, value: float = 1) -> ir.Value:
    """In eager's order, with a factor of the tensors' own type."""
    factor = tensor1 if value == 1 else op("Mul", tensor1, value)
    return op("Add", self, op("Mul", factor, tensor2))


@translates(aten.addcdiv.default)
def addcdiv(self: ir.Value, tensor1: ir.Value, tensor2: ir.Value, value: float = 1) -> ir.Value:
    """In eager's order: an infinite factor of a quotient that is rounded to zero is not a number."""
    dividend = tensor1 if value == 1 else op("Mul", tensor1, value)
    return op("Add", self, op("Div", dividend, tensor2))


@translates(aten.scalar_tensor.default)
def scalar_tensor(s: float | ir.Value, dtype: int = ir.DataType.FLOAT, **_: object) -> ir.Value:
    """In its own type from the start: by way of float, a double would lose half of its digits."""
    target = ir.DataType(dtype if dtype != -1 else ir.DataType.FLOAT)
    if isinstance(s, ir.Value):
        return op("Cast", s, to=int(target))
    return constant(s, target)


@translates(aten.angle.default)
def angle(self: ir.Value) -> ir.Value:
    """Pi below zero; of integers, too, for which torch.onnx cuts its fraction off."""
    assert self.dtype is not None
    is_fraction = self.dtype.is_floating_point()
    x = self if is_fraction else op("Cast", self, to=int(ir.DataType.FLOAT), dtype=ir.DataType.FLOAT)
    assert x.dtype is not None
    zero, pi = (constant(np.array(number, x.dtype.numpy())) for number in (0, math.pi))
    found = op("Where", op("Less", x, zero), pi, zero)
    return op("Where", op("IsNaN", x), x, found) if is_fraction else found
