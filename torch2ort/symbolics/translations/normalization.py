"""Layer normalization."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import torch

from torch2ort.symbolics.graph_builder import constant, op, ops, shape_of
from torch2ort.symbolics.translations.registry import translates

aten = torch.ops.aten


@translates(aten.layer_norm.default)
def layer_norm(
    input: ir.Value,
    normalized_shape: Sequence[int | ir.Value],
    weight: ir.Value | None = None,
    bias: ir.Value | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> ir.Value:
    """With scale, bias and all three outputs, which its gradient reads."""
    assert input.dtype is not None
    # ONNX's statistics are in the type that it computes in.
    statistics = ir.DataType.FLOAT if input.dtype == ir.DataType.FLOAT16 else input.dtype
    return ops(
        "LayerNormalization",
        input,
        _filled(normalized_shape, 1, input.dtype) if weight is None else weight,
        _filled(normalized_shape, 0, input.dtype) if bias is None else bias,
        dtypes=(input.dtype, statistics, statistics),
        axis=-len(normalized_shape),
        epsilon=float(eps),
    )[0]


@translates(aten.native_layer_norm.default)
def native_layer_norm(
    input: ir.Value,
    normalized_shape: Sequence[int | ir.Value],
    weight: ir.Value | None,
    bias: ir.Value | None,
    eps: float,
) -> Sequence[ir.Value]:
    """The normalized input, the means, and the inverse standard deviations.

    The latter two by operators of their own: ONNX's are in the type that it computes in, and a runtime's
    input may be centered before (runtime/centering.py).
    """
    assert input.dtype is not None
    half = input.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    wide = ir.DataType.FLOAT if half else input.dtype
    values = op("Cast", input, dtype=wide, to=wide) if half else input
    axes = constant(np.arange(-len(normalized_shape), 0))
    mean = op("ReduceMean", values, axes, keepdims=1)
    centered = op("Sub", values, mean)
    variance = op("ReduceMean", op("Mul", centered, centered), axes, keepdims=1)
    inverse = op("Reciprocal", op("Sqrt", op("Add", variance, float(eps))))
    # With weights in float32 eager PyTorch gives these in float32, too.
    narrow = half and (weight is None or weight.dtype == input.dtype)
    statistics = [op("Cast", v, dtype=input.dtype, to=input.dtype) if narrow else v for v in (mean, inverse)]
    return [layer_norm(input, normalized_shape, weight, bias, eps), *statistics]


def _filled(shape: Sequence[int | ir.Value], value: int, dtype: ir.DataType) -> ir.Value:
    if all(isinstance(s, int) for s in shape):
        return constant(np.full(shape, value, dtype.numpy()))
    return op("Expand", constant(np.array(value, dtype.numpy())), shape_of(shape))
