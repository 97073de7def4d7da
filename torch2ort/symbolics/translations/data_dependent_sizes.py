"""Translations of operators for sizes that depend on values."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from torch2ort.program import internal_ops
from torch2ort.symbolics.graph_builder import constant, op
from torch2ort.symbolics.translations.registry import translates


@translates(internal_ops.of_sizes)
def of_sizes(self: ir.Value, sizes: Sequence[ir.Value | int]) -> ir.Value:
    """Return the tensor itself."""
    return op("Identity", self)


@translates(internal_ops.number_as_sizes)
def number_as_sizes(number: ir.Value, low: int | None, high: int | None) -> ir.Value:
    """Return a tensor without elements; an earlier node checked that the number is within its bounds."""
    one = op("Reshape", number, constant([1]))
    parts = [one] if low is not None and low >= 0 else [op("Max", one, 0), op("Max", op("Neg", one), 0)]
    shape = op("Concat", *parts, constant([0]), axis=0)
    return op("ConstantOfShape", shape, value=ir.tensor([0], dtype=ir.DataType.INT64))
