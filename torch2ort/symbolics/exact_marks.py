"""Marks of the nodes that have different forms in a file and in a session of torch2ort.

Some nodes treat NaN and infinity wrongly in ONNX Runtime: sessions add nodes around them
(runtime/workarounds/nan_inf.py). For GELU, files contain its formula (graph/gelu_formulas.py).
"""

from __future__ import annotations

import onnx_ir as ir

from torch2ort.graph.exact_nodes import GELU_META, NAN_META
from torch2ort.support.provenance import operator_of
from torch2ort.symbolics.element_types import operator_name, typed_nodes
from torch2ort.symbolics.registered.exporter_calls import WRITTEN_BY_USERS

_OPERATORS = frozenset({"ReduceMax", "ReduceMin", "ArgMax", "ArgMin", "MaxPool", "TopK", "Erf", "Sign"})
_GELUS = frozenset({"com.microsoft::Gelu", "com.microsoft::FastGelu"})


def mark_exact(model: ir.Model) -> None:
    """Mark these nodes, except those that users wrote.

    Args:
        model: the graph; the types of its values are final.
    """
    for typed in typed_nodes(model):
        node = typed.node
        dtype = node.inputs[0].dtype if node.inputs and node.inputs[0] is not None else None
        if dtype is None or not dtype.is_floating_point() or WRITTEN_BY_USERS in node.meta:
            continue
        if node.op_type == "Erf" and "gelu" in operator_of(node):
            # The product with NaN is NaN, independently of Erf's result.
            continue
        if operator_name(node) in _GELUS:
            node.metadata_props[GELU_META] = dtype.name
        elif operator_name(node) in _OPERATORS and not (node.op_type == "MaxPool" and len(node.outputs) > 1):
            node.metadata_props[NAN_META] = dtype.name
