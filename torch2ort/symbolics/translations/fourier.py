"""Translations of Fourier transforms."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch

from torch2ort.symbolics.graph_builder import constant, op
from torch2ort.symbolics.translations.registry import translates

aten = torch.ops.aten

# PyTorch's codes for a division by the root of the length, and for none.
_BY_ROOT, _BY_NOTHING = 1, 0


@translates(aten._fft_c2r.default, of_complex=True)
def fft_c2r(
    self: ir.Value, dim: Sequence[int], normalization: int, last_dim_size: int | ir.Value
) -> ir.Value:
    """Use two-sided inverse transforms: older onnxruntimes (such as 1.24) have no one-sided ones.

    A complex tensor is a tensor of pairs, with the pair as its last dimension.
    """
    is_first = 0 in dim
    pairs = op("Unsqueeze", self, constant([0])) if is_first else self
    *others, last = (axis + is_first for axis in dim)
    for axis in others:
        pairs = _inverse(pairs, axis, normalization)
    pairs = _inverse(_both_sides(pairs, last, last_dim_size), last, normalization)
    real = op("Gather", pairs, constant(0), axis=-1)
    return op("Squeeze", real, constant([0])) if is_first else real


def _both_sides(pairs: ir.Value, axis: int, length: int | ir.Value) -> ir.Value:
    """Complete the spectrum of a real signal: the missing half are the conjugates, in the opposite order."""
    if isinstance(length, int):
        highest: ir.Value = constant([(length - 1) // 2])
    else:
        less_one = op("Sub", op("Reshape", length, constant([1])), constant([1]))
        highest = op("Div", less_one, constant([2]))
    upper = op("Slice", pairs, highest, constant([0]), constant([axis]), constant([-1]))
    return op("Concat", pairs, op("Mul", upper, constant([1, -1], pairs.dtype)), axis=axis)


def _inverse(pairs: ir.Value, axis: int, normalization: int) -> ir.Value:
    """Compute the inverse transform along an axis; ONNX's is divided by the length."""
    result = op("DFT", pairs, axis=axis, inverse=1)
    if normalization not in (_BY_ROOT, _BY_NOTHING):
        return result
    length = op("Cast", op("Shape", pairs, start=axis, end=axis + 1), to=pairs.dtype)
    return op("Mul", result, op("Sqrt", length) if normalization == _BY_ROOT else length)
