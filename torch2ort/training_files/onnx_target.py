"""The target of a training step's graph: ONNX's own operators, in any runtime."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from torch2ort.errors import UnsupportedOperatorError
from torch2ort.program.decomposition_table import Table
from torch2ort.program.pool_padding import of_each
from torch2ort.program.target import GradientRules, GradientSource, Target
from torch2ort.runtime.kernel_support import can_run, checked_opset
from torch2ort.symbolics.graph_builder import constant, op, ops
from torch2ort.symbolics.translations.activation import quotient
from torch2ort.training_files.decompositions import STEP

aten = torch.ops.aten


def plain_target(opset: int | None, *, is_step: bool, training: bool = False) -> Target:
    """Return the target of a graph without PyTorch's kernels.

    Args:
        opset: version of ONNX's operators; ``None`` for the default.
        is_step: True if the graph contains the backward of its Functions, too.
        training: the mode of the traced model.

    Raises:
        OptionError: the installed onnx or onnxruntime does not support the opset.
    """
    return Target(
        opset=checked_opset(opset),
        can_run=can_run,
        gradients=GradientRules(
            source=GradientSource.HALVES if is_step else GradientSource.NOWHERE,
            not_decomposed=frozenset({aten.gelu.default}),
            decompositions=_with_derivatives,
        ),
        has_kernels=False,
        translations=_TRANSLATIONS,
        training=training,
    )


def _with_derivatives(table: Table) -> Table:
    return {**table, **STEP}


def _gelu(self: ir.Value, approximate: str = "none") -> ir.Value:
    """Translate gelu to its parts: ONNX has the operator only since opset 20, and runtimes fuse the parts."""
    dtype = self.dtype.numpy()  # type: ignore[union-attr]

    def number(value: float) -> ir.Value:
        return constant(np.array(value, dtype))

    if approximate == "tanh":
        cube = op("Mul", op("Mul", self, self), self)
        inner = op("Add", self, op("Mul", cube, number(0.044715)))
        whole = op("Tanh", op("Mul", inner, number(math.sqrt(2 / math.pi))))
    else:
        # For NaN the product is NaN, whatever Erf returns.
        whole = op("Erf", op("Div", self, number(math.sqrt(2))))
    return op("Mul", op("Mul", self, op("Add", whole, number(1))), number(0.5))


def _max_pool(axes: int) -> Callable[..., Sequence[ir.Value]]:
    def translate(
        self: ir.Value,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,),
        ceil_mode: bool = False,
    ) -> Sequence[ir.Value]:
        """Return the maximum of each window, and its index within the plane."""
        if ceil_mode:
            raise UnsupportedOperatorError(
                "max_pool with ceil_mode=True counts windows otherwise than ONNX. Pad the input instead"
            )
        full = [of_each(one, axes) for one in (kernel_size, stride or kernel_size, padding, dilation)]
        assert self.shape is not None
        batched = len(self.shape) == axes + 2
        data = self if batched else op("Unsqueeze", self, constant([0]))
        values, places = ops(
            "MaxPool",
            data,
            dtypes=(self.dtype, ir.DataType.INT64),
            kernel_shape=full[0],
            strides=full[1],
            pads=[*full[2], *full[2]],
            dilations=full[3],
        )
        # ONNX's indices refer to the whole tensor, PyTorch's to each plane.
        rank = len(self.shape)
        cells = op("ReduceProd", op("Shape", self, start=rank - axes, end=rank), keepdims=0)
        within = op("Mod", places, cells)
        if batched:
            return values, within
        return tuple(op("Squeeze", one, constant([0])) for one in (values, within))

    return translate


def _product(letters: str) -> Callable[[ir.Value, ir.Value], ir.Value]:
    def translate(self: ir.Value, other: ir.Value) -> ir.Value:
        """Translate to Einsum in double: runtimes fuse MatMul and Transpose to an operator without double."""
        if self.dtype == ir.DataType.DOUBLE:
            return op("Einsum", self, other, equation=letters)
        return op("MatMul", self, other)

    return translate


# PyTorch has composites of the next two operators, which no table decomposes.


def _silu_backward(grad_output: ir.Value, self: ir.Value) -> ir.Value:
    """Translate the derivative of ``x sigmoid(x)``."""
    one = constant(np.array(1, self.dtype.numpy()))  # type: ignore[union-attr]
    part = quotient(self)
    slope = op("Mul", part, op("Add", one, op("Mul", self, op("Sub", one, part))))
    return op("Mul", grad_output, slope)


def _mish_backward(grad_output: ir.Value, self: ir.Value) -> ir.Value:
    """Translate the derivative of ``x tanh(softplus(x))``."""
    one = constant(np.array(1, self.dtype.numpy()))  # type: ignore[union-attr]
    zero = constant(np.array(0, self.dtype.numpy()))  # type: ignore[union-attr]
    small = op("Log", op("Add", one, op("Exp", op("Neg", op("Abs", self)))))
    bent = op("Tanh", op("Add", op("Max", self, zero), small))
    rest = op("Sub", one, op("Mul", bent, bent))
    return op("Mul", grad_output, op("Add", bent, op("Mul", op("Mul", self, quotient(self)), rest)))


_TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.bmm.default: _product("abc,acd->abd"),
    aten.mm.default: _product("ab,bc->ac"),
    aten.gelu.default: _gelu,
    aten.mish_backward.default: _mish_backward,
    aten.sigmoid.default: quotient,
    aten.silu_backward.default: _silu_backward,
    aten.max_pool2d_with_indices.default: _max_pool(2),
    aten.max_pool3d_with_indices.default: _max_pool(3),
}
