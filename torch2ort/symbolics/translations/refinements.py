"""Translations of refinements, which are nodes that files store as metadata."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from torch2ort.graph.refinements import EXACT
from torch2ort.kernels.index_check import CHECKED_INDEX
from torch2ort.program import internal_ops
from torch2ort.program.effect_order import MUST_COMPUTE
from torch2ort.symbolics.graph_builder import op
from torch2ort.symbolics.translations.registry import translates


@translates(internal_ops.checked_index)
def checked_index(index: ir.Value, tensors: Sequence[ir.Value], check: str) -> ir.Value:
    """Add a node that sessions replace by operators of ONNX."""
    return op(CHECKED_INDEX, index, *tensors, check=check)


@translates(internal_ops.exact)
def exact(plain: ir.Value, exact: ir.Value) -> ir.Value:
    """Add a node that sessions replace by its second input, files by the first one."""
    return op(EXACT, plain, exact, dtype=exact.dtype)


@translates(internal_ops.must_compute)
def must_compute(value: ir.Value) -> ir.Value:
    """Add a node that holds its place until unused calls are tied to an output."""
    return op(MUST_COMPUTE, value, dtype=ir.DataType.INT64)
