"""Translations of the operators on the rows of a packed tensor."""

from __future__ import annotations

import onnx_ir as ir

from torch2ort.program import internal_ops
from torch2ort.symbolics.graph_builder import constant, op
from torch2ort.symbolics.translations.registry import translates


@translates(internal_ops.take_rows)
def take_rows(self: ir.Value, rows: ir.Value) -> ir.Value:
    """Return some rows of a tensor."""
    return op("Gather", self, rows, axis=0)


@translates(internal_ops.fill_rows)
def fill_rows(self: ir.Value, inverse: ir.Value, rows: ir.Value) -> ir.Value:
    """Return the rows of a tensor in another order."""
    return op("Gather", self, inverse, axis=0)


@translates(internal_ops.put_rows)
def put_rows(self: ir.Value, rows: ir.Value, size: ir.Value | int) -> ir.Value:
    """Return a tensor of zeros besides some rows."""
    assert self.dtype is not None
    count = constant([size]) if isinstance(size, int) else op("Reshape", size, constant([1]))
    index, sizes = op("Unsqueeze", rows, constant([1])), op("Shape", self, start=1)
    if self.dtype != ir.DataType.BFLOAT16:
        zeros = _zeros(op("Concat", count, sizes, axis=0), self.dtype)
        return op("ScatterND", zeros, index, self)
    # ONNX Runtime has no ScatterND for this type: a row of zeros is gathered for all others.
    none = _zeros(op("Concat", constant([1]), sizes, axis=0), ir.DataType.FLOAT)
    given = op("Concat", self, op("Cast", none, to=self.dtype.value, dtype=self.dtype), axis=0)
    number = op("Shape", self, start=0, end=1)
    places = op("Range", 0, op("Squeeze", number), 1, dtype=ir.DataType.INT64)
    place = op("ScatterND", op("Expand", number, count), index, places)
    return op("Gather", given, place, axis=0)


def _zeros(shape: ir.Value, dtype: ir.DataType) -> ir.Value:
    return op("ConstantOfShape", shape, value=ir.tensor([0], dtype=dtype), dtype=dtype)
