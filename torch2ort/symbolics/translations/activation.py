"""Translations of activations that ONNX Runtime has a kernel and a gradient for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import torch

from torch2ort.symbolics.graph_builder import constant, op, ops
from torch2ort.symbolics.translations.registry import EXPORTED, translates

aten = torch.ops.aten


# ONNX Runtime's Sigmoid is zero below -18, where a float still represents many numbers. A quotient is exact
# there. A session of torch2ort replaces Sigmoid by a quotient (runtime/workarounds/sigmoid.py).


@translates(aten.sigmoid.default)
def sigmoid(self: ir.Value) -> ir.Value:
    """Use ONNX's Sigmoid; in double a quotient, as some runtimes fuse Sigmoid without a double kernel."""
    return quotient(self) if self.dtype == ir.DataType.DOUBLE else op("Sigmoid", self)


def quotient(self: ir.Value) -> ir.Value:
    """Compute ``1 / (1 + exp(-x))``."""
    return _times_sigmoid(constant(np.array(1, self.dtype.numpy())), self)  # type: ignore[union-attr]


@translates(aten.silu.default)
def silu(self: ir.Value) -> ir.Value:
    """Compute ``x / (1 + exp(-x))``, which no runtime fuses into an operator without a kernel for doubles."""
    return _times_sigmoid(self, self)


@translates(aten.glu.default)
def glu(self: ir.Value, dim: int = -1) -> ir.Value:
    """Divide the first half by ``1 + exp(-second half)``."""
    halves = ops("Split", self, axis=dim, num_outputs=2, dtypes=(None, None))
    return _times_sigmoid(*halves)


@translates(aten.silu.default, table=EXPORTED)
def exported_silu(self: ir.Value) -> ir.Value:
    """Compute ``x * Sigmoid(x)``, the form in files."""
    return op("Mul", self, sigmoid(self)) if self.dtype != ir.DataType.DOUBLE else silu(self)


@translates(aten.glu.default, table=EXPORTED)
def exported_glu(self: ir.Value, dim: int = -1) -> ir.Value:
    """Multiply the first half by the Sigmoid of the second, the form in files."""
    if self.dtype == ir.DataType.DOUBLE:
        return glu(self, dim)
    first, second = ops("Split", self, axis=dim, num_outputs=2, dtypes=(None, None))
    return op("Mul", first, sigmoid(second))


def _times_sigmoid(factor: ir.Value, of: ir.Value) -> ir.Value:
    return op("Div", factor, op("Add", op("Exp", op("Neg", of)), 1.0))


@translates(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(self: ir.Value, min: ir.Value | float) -> ir.Value:
    """Use Max: a Clip with one bound would cut infinity down to the largest number."""
    return op("Max", self, min)


@translates(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(self: ir.Value, max: ir.Value | float) -> ir.Value:
    """Use Min, as :func:`clamp_min` uses Max."""
    return op("Min", self, max)


@translates(aten.prelu.default)
def prelu(self: ir.Value, weight: ir.Value) -> ir.Value:
    """Use Where: ONNX Runtime's PRelu multiplies infinity by zero, up to 1.24."""
    assert self.shape is not None
    assert weight.shape is not None
    rank = len(self.shape)
    if rank == 0 or (rank > 2 and weight.shape[0] != 1):
        # One weight per channel; the channels are the second dimension.
        weight = op("Reshape", weight, constant(np.array([-1, *[1] * (rank - 2)] if rank else [], np.int64)))
    zero = constant(np.array(0, self.dtype.numpy()))  # type: ignore[union-attr]
    return op("Where", op("Greater", self, zero), self, op("Mul", self, weight))


def _softmax(operator: str) -> Callable[..., ir.Value]:
    def translate(self: ir.Value, dim: int, dtype: int = -1) -> ir.Value:
        assert self.shape is not None
        # Compute in the wanted type, where torch.onnx casts the result.
        x = op("Cast", self, to=dtype, dtype=ir.DataType(dtype)) if dtype not in (-1, self.dtype) else self
        if self.shape:
            return op(operator, x, axis=dim)
        return op("Squeeze", op(operator, op("Unsqueeze", x, constant([0])), axis=0), constant([0]))

    return translate


translates(aten.softmax.int, aten.special_softmax.default)(_softmax("Softmax"))
translates(aten.log_softmax.int, aten.special_log_softmax.default)(_softmax("LogSoftmax"))


@translates(aten.gelu.default)
def gelu(self: ir.Value, approximate: str = "none") -> ir.Value:
    """Use ONNX Runtime's own operators, at every opset."""
    return op("com.microsoft::FastGelu" if approximate == "tanh" else "com.microsoft::Gelu", self)
