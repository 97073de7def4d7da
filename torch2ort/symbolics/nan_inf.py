"""Numbers that ONNX Runtime takes for others in reductions, pools and sorting.

It passes NaN over, which in eager is the result or the greatest. The maximum of a window of minus infinity
alone it takes for the smallest number.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from torch2ort.graph.exact_nodes import EXACT_META, NAN
from torch2ort.symbolics.element_types import typed_nodes
from torch2ort.symbolics.registered.exporter_calls import WRITTEN_BY_USERS

_GREATEST = {
    ir.DataType.FLOAT: float(np.finfo(np.float32).max),
    ir.DataType.DOUBLE: float(np.finfo(np.float64).max),
    ir.DataType.FLOAT16: float(np.finfo(np.float16).max),
}
_BOOL, _FLOAT, _INT64 = ir.DataType.BOOL, ir.DataType.FLOAT, ir.DataType.INT64


def keep_nan(model: ir.Model, *, is_exported: bool) -> None:
    """Rewrite in place every node that would pass NaN over, or take infinity for a number.

    Args:
        model: the graph.
        is_exported: whether the graph is one for files, in which pools are ONNX's own, marked for sessions of
            torch2ort's (runtime/workarounds/pool_nan.py).
    """
    for typed in list(typed_nodes(model)):
        node = typed.node
        source = node.inputs[0] if node.inputs else None
        if WRITTEN_BY_USERS in node.meta:
            continue
        if node.domain or source is None or source.dtype is None or not source.dtype.is_floating_point():
            continue
        if node.op_type in ("ReduceMax", "ReduceMin"):
            _Rewriter(node).reduction(source)
        elif node.op_type in ("ArgMax", "ArgMin"):
            _Rewriter(node).position(source)
        elif node.op_type == "MaxPool" and len(node.outputs) == 1:
            if is_exported and source.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
                node.metadata_props[EXACT_META] = NAN
            else:
                _Rewriter(node).pool(source)
        elif node.op_type == "TopK":
            _Rewriter(node).order(source)


class _Rewriter:
    """Puts nodes around one node."""

    def __init__(self, node: ir.Node) -> None:
        self._node = node

    def reduction(self, source: ir.Value) -> None:
        """NaN where there is one."""
        found = self._add("ReduceMax", [self._flags(source), *self._node.inputs[1:]], _FLOAT, self._shared())
        nan = self._constant(math.nan, source.dtype)
        self._choose(self._truth(found), nan)

    def position(self, source: ir.Value) -> None:
        """The position of the first NaN where there is one."""
        flags = self._flags(source)
        first = self._add("ArgMax", [flags], _INT64, self._shared())
        axis = self._node.attributes.get_int("axis", 0)
        keep = ir.AttrInt64("keepdims", self._node.attributes.get_int("keepdims", 1))
        found = self._add("ReduceMax", [flags, self._constant([axis], _INT64)], _FLOAT, [keep])
        self._choose(self._truth(found), first)

    def pool(self, source: ir.Value) -> None:
        """NaN where there is one in the window, and minus infinity where there is nothing else."""
        nan, smallest = (self._constant(number, source.dtype) for number in (math.nan, -math.inf))
        none, one, nans = (self._constant(kind, _FLOAT) for kind in (0.0, 1.0, 2.0))
        number = self._add("Where", [self._add("Greater", [source, smallest], _BOOL), one, none], _FLOAT)
        kinds = self._add("Where", [self._add("IsNaN", [source], _BOOL), nans, number], _FLOAT)
        found = self._add("MaxPool", [kinds], _FLOAT, self._shared())
        special = self._add("Where", [self._add("Greater", [found, one], _BOOL), nan, smallest], source.dtype)
        self._choose(self._add("Not", [self._add("Equal", [found, one], _BOOL)], _BOOL), special)

    def order(self, source: ir.Value) -> None:
        """NaN counts as greater than infinity, and that as the greatest number."""
        node = self._node
        assert source.dtype is not None
        greatest = self._constant(_GREATEST.get(source.dtype, math.inf), source.dtype)
        finite = self._add("Min", [source, greatest], source.dtype)
        infinity = self._constant(math.inf, source.dtype)
        comparable = self._add("Where", [self._add("IsNaN", [source], _BOOL), infinity, finite], source.dtype)
        node.replace_input_with(0, comparable)
        values, indices = node.outputs
        axis = [ir.AttrInt64("axis", node.attributes.get_int("axis", -1))]
        made = self._add("GatherElements", [source, indices], values.dtype, axis, behind=True)
        _take_over(made, values)

    def _choose(self, condition: ir.Value, other: ir.Value) -> None:
        result = self._node.outputs[0]
        chosen = self._add("Where", [condition, other, result], result.dtype, behind=True)
        _take_over(chosen, result)

    def _flags(self, source: ir.Value) -> ir.Value:
        is_nan = self._add("IsNaN", [source], _BOOL)
        return self._add("Cast", [is_nan], _FLOAT, [ir.AttrInt64("to", int(_FLOAT))])

    def _truth(self, flags: ir.Value) -> ir.Value:
        return self._add("Cast", [flags], _BOOL, [ir.AttrInt64("to", int(_BOOL))])

    def _shared(self) -> list[ir.Attr]:
        return list(self._node.attributes.values())

    def _constant(self, value: float | list[int], dtype: ir.DataType | None) -> ir.Value:
        assert dtype is not None
        tensor = ir.tensor(np.array(value, dtype.numpy()), dtype=dtype)
        return self._add("Constant", [], dtype, [ir.AttrTensor("value", tensor)])

    def _add(
        self,
        operator: str,
        inputs: list[ir.Value | None],
        dtype: ir.DataType | None,
        attributes: list[ir.Attr] | None = None,
        *,
        behind: bool = False,
    ) -> ir.Value:
        made = ir.Node("", operator, inputs, attributes or [], num_outputs=1)
        made.metadata_props.update(self._node.metadata_props)
        if dtype is not None:
            made.outputs[0].dtype = dtype
        graph = self._node.graph
        assert graph is not None
        if behind:
            graph.insert_after(self._node, made)
        else:
            graph.insert_before(self._node, made)
        return made.outputs[0]


def _take_over(made: ir.Value, result: ir.Value) -> None:
    """Let everyone read ``made`` but the node that makes it, under the name of ``result``."""
    producer = made.producer()
    assert producer is not None
    made.name, result.name = result.name, f"{result.name}.number"
    made.shape = result.shape
    made.metadata_props.update(result.metadata_props)
    positions = [i for i, value in enumerate(producer.inputs) if value is result]
    ir.convenience.replace_all_uses_with(result, made, replace_graph_outputs=True)
    for i in positions:
        producer.replace_input_with(i, result)
