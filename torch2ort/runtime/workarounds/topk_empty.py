"""Sorting of empty tensors, in which some versions of onnxruntime divide by zero and end the process.

For these versions, the sort is put into a branch that does not run for a tensor without elements.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper

from torch2ort.runtime import _ort_private as private
from torch2ort.runtime.replace_nodes import branch, constant, replace_nodes, unless

# The oldest version that was seen to be correct.
_RIGHT_SINCE = (1, 31)


@functools.cache
def sorts_no_elements() -> bool:
    """Return True if this onnxruntime's version can sort them; a run to test it could end the process."""
    return private.version() >= _RIGHT_SINCE


def guard_sorts(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return ``model``, or a copy that sorts a tensor only if it has elements."""
    return model if sorts_no_elements() else replace_nodes(model, _is_sort, _guarded)


def _is_sort(node: onnx.NodeProto) -> bool:
    return node.op_type == "TopK" and not node.domain


def _guarded(node: onnx.NodeProto, shapes: Mapping[str, list[int]]) -> Iterator[onnx.NodeProto]:
    if all(size > 0 for size in shapes.get(node.input[0], [0])):
        yield node
        return
    source, name = node.input[0], f"{node.output[0]}/guard"
    yield helper.make_node("Size", [source], [f"{name}/size"], name=f"{name}/size")
    yield constant(f"{name}/zero", np.array(0))
    yield helper.make_node("Equal", [f"{name}/size", f"{name}/zero"], [f"{name}/empty"], name=f"{name}/empty")
    yield unless(f"{name}/empty", node, name, _without_elements(node, f"{name}/then"))


def _without_elements(node: onnx.NodeProto, name: str) -> onnx.GraphProto:
    """Return as many places as are requested along the axis, which must not be more than it has."""
    source, count = node.input
    axis = next((a.i for a in node.attribute if a.name == "axis"), -1)
    kind = helper.make_tensor("kind", TensorProto.INT64, [1], [0])
    nodes = [
        helper.make_node("Shape", [source], [f"{name}/sizes"]),
        constant(f"{name}/axis", np.array([axis])),
        constant(f"{name}/first", np.array(0)),
        constant(f"{name}/step", np.array(1)),
        constant(f"{name}/scalar", np.array([], np.int64)),
        helper.make_node("GatherElements", [f"{name}/sizes", f"{name}/axis"], [f"{name}/length"]),
        helper.make_node("Add", [f"{name}/length", f"{name}/step"], [f"{name}/lengths"]),
        helper.make_node("Reshape", [f"{name}/lengths", f"{name}/scalar"], [f"{name}/end"]),
        helper.make_node("Range", [f"{name}/first", f"{name}/end", f"{name}/step"], [f"{name}/allowed"]),
        helper.make_node("Gather", [f"{name}/allowed", count], [f"{name}/count"]),
        helper.make_node(
            "ScatterElements", [f"{name}/sizes", f"{name}/axis", f"{name}/count"], [f"{name}/result"]
        ),
        helper.make_node("Reshape", [source, f"{name}/result"], [f"{name}/values"], allowzero=1),
        helper.make_node("ConstantOfShape", [f"{name}/result"], [f"{name}/indices"], value=kind),
    ]
    for made in nodes:
        made.name = made.output[0]
    return branch(name, nodes, [f"{name}/values", f"{name}/indices"])
