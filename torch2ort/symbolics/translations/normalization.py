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
    return _layer_norm(input, normalized_shape, weight, bias, eps)[0]


@translates(aten.native_layer_norm.default)
def native_layer_norm(
    input: ir.Value,
    normalized_shape: Sequence[int | ir.Value],
    weight: ir.Value | None,
    bias: ir.Value | None,
    eps: float,
) -> Sequence[ir.Value]:
    """The normalized input, the means, and the inverse standard deviations."""
    output, *statistics = _layer_norm(input, normalized_shape, weight, bias, eps)
    if input.dtype == ir.DataType.FLOAT16:
        statistics = [op("Cast", value, dtype=input.dtype, to=input.dtype) for value in statistics]
    return [output, *statistics]


def _layer_norm(
    input: ir.Value,
    normalized_shape: Sequence[int | ir.Value],
    weight: ir.Value | None,
    bias: ir.Value | None,
    eps: float,
) -> Sequence[ir.Value]:
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
    )


def _filled(shape: Sequence[int | ir.Value], value: int, dtype: ir.DataType) -> ir.Value:
    if all(isinstance(s, int) for s in shape):
        return constant(np.full(shape, value, dtype.numpy()))
    return op("Expand", constant(np.array(value, dtype.numpy())), shape_of(shape))
