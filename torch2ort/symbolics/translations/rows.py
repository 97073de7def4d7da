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
    shape = op("Concat", count, op("Shape", self, start=1), axis=0)
    zeros = op("ConstantOfShape", shape, value=ir.tensor([0], dtype=self.dtype))
    return op("ScatterND", zeros, op("Unsqueeze", rows, constant([1])), self)
