"""Translations of layer normalization, and of normalization by the statistics of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import torch

from torch2ort.symbolics.graph_builder import constant, op, ops, rank, shape_of, size
from torch2ort.symbolics.translations.registry import EXPORTED, translates

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
    """Use scale, bias and all three outputs, which the gradient reads.

    ONNX's epsilon is a float32, so a double is normalized by separate operators.
    """
    assert input.dtype is not None
    if input.dtype == ir.DataType.DOUBLE:
        centered, _, inverse = _centered(input, normalized_shape, eps)
        result = op("Mul", centered, inverse)
        result = result if weight is None else op("Mul", result, weight)
        return result if bias is None else op("Add", result, bias)
    # ONNX's statistics have the type that it computes in.
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
    """Return the normalized input, the means, and the inverse standard deviations.

    The latter two are computed by separate operators: ONNX's have the type that it computes in, and a runtime
    may center the input before (runtime/workarounds/layernorm_centering.py).
    """
    assert input.dtype is not None
    half = input.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    wide = ir.DataType.FLOAT if half else input.dtype
    values = op("Cast", input, dtype=wide, to=wide) if half else input
    _, mean, inverse = _centered(values, normalized_shape, eps)
    # With weights in float32 eager PyTorch returns the statistics in float32, too.
    narrow = half and (weight is None or weight.dtype == input.dtype)
    statistics = [op("Cast", v, dtype=input.dtype, to=input.dtype) if narrow else v for v in (mean, inverse)]
    return [layer_norm(input, normalized_shape, weight, bias, eps), *statistics]


def _centered(
    values: ir.Value, normalized_shape: Sequence[int | ir.Value], eps: float
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return the values minus their means, the means, and the inverse standard deviations."""
    axes = constant(np.arange(-len(normalized_shape), 0))
    mean = op("ReduceMean", values, axes, keepdims=1)
    centered = op("Sub", values, mean)
    variance = op("ReduceMean", op("Mul", centered, centered), axes, keepdims=1)
    return centered, mean, op("Reciprocal", op("Sqrt", op("Add", variance, float(eps))))


@translates(aten._native_batch_norm_legit_functional.default, table=EXPORTED)
def batch_norm(
    input: ir.Value,
    weight: ir.Value | None,
    bias: ir.Value | None,
    running_mean: ir.Value,
    running_var: ir.Value,
    training: bool,
    momentum: float,
    eps: float,
) -> Sequence[ir.Value]:
    """Return the output, the batch's mean and inverse standard deviation, and the new running statistics.

    ONNX's running variance is that of the population, and its momentum a float32. So the statistics are
    scaled before and after. ONNX Runtime writes the new statistics into the memory of the old ones, which is
    therefore that of a product.
    """
    assert input.dtype is not None
    assert input.shape is not None
    channels = input.shape[1] if isinstance(input.shape[1], int) else size(input, 1)
    kept, share, gain = _scaling(momentum)
    count = op("Cast", op("Div", op("Size", input), size(input, 1)), to=int(input.dtype))
    fraction = op("Div", op("Sub", count, 1), count)
    output, mean, variance = ops(
        "BatchNormalization",
        input,
        _filled([channels], 1, input.dtype) if weight is None else weight,
        _filled([channels], 0, input.dtype) if bias is None else bias,
        op("Mul", running_mean, kept),
        op("Mul", op("Mul", running_var, kept), fraction),
        dtypes=(input.dtype,) * 3,
        epsilon=float(eps),
        momentum=share,
        training_mode=1,
    )
    means = (op("Mul", mean, gain), op("Div", op("Mul", variance, gain), fraction))
    return output, *_of_batch(input, eps), *means


def _scaling(momentum: float) -> tuple[float, float, float]:
    """Return factors before and after an average by a ``share`` that make it one by ``1 - momentum``.

    ``gain * (share * (kept * old) + (1 - share) * new)`` is ``(1 - momentum) * old + momentum * new``.
    ``kept`` is never 1, as a product by 1 would be removed.
    """
    if momentum == 0:
        return 2.0, 1.0, 0.5
    share = 0.25 if momentum == 0.5 else 0.5
    gain = momentum / (1 - share)
    return (1 - momentum) / (gain * share), share, gain


def _of_batch(input: ir.Value, eps: float) -> tuple[ir.Value, ir.Value]:
    """Return the mean of each channel, and its inverse standard deviation."""
    axes = constant([0, *range(2, rank(input))])
    mean = op("ReduceMean", input, axes, keepdims=1)
    centered = op("Sub", input, mean)
    variance = op("ReduceMean", op("Mul", centered, centered), axes, keepdims=0)
    inverse = op("Reciprocal", op("Sqrt", op("Add", variance, float(eps))))
    return op("Reshape", mean, constant([-1])), inverse


def _filled(shape: Sequence[int | ir.Value], value: int, dtype: ir.DataType) -> ir.Value:
    if all(isinstance(s, int) for s in shape):
        return constant(np.full(shape, value, dtype.numpy()))
    return op("Expand", constant(np.array(value, dtype.numpy())), shape_of(shape))
