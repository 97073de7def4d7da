"""Indices out of range: ONNX Runtime is made to refuse those that eager PyTorch refuses.

ONNX counts negative indices from the end, and some of ONNX Runtime's kernels read any memory that an index
points to. A check moves a bad index so far out of range that the operator that reads it refuses it, or looks
each index up in a table of the valid ones.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper

from torch2ort.graph.refinements import check_of, is_check
from torch2ort.kernels.index_check import BOUNDLESS, Check, decode_check
from torch2ort.runtime.replace_nodes import constant, replace_nodes

# An index that far below zero is out of range for every tensor, also after the addition of a small number. A
# cast to int32 keeps the lower half, for which the same holds.
_FAR = (1 << 62) + (1 << 30)


def guard_indices(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return ``model``, or a copy that checks its indices with operators of ONNX."""
    return replace_nodes(model, is_check, _guarded)


def _guarded(node: onnx.NodeProto, shapes: Mapping[str, list[int]]) -> list[onnx.NodeProto]:
    index, *tensors = node.input
    made = _Nodes(node.output[0])
    # In int64, for every dtype of the indices.
    wide = made.add("Cast", index)
    made.nodes[0].attribute.append(helper.make_attribute("to", onnx.TensorProto.INT64))
    checked = made.check_index(decode_check(check_of(node)), wide, tensors)
    last = helper.make_node("CastLike", [checked, index], [node.output[0]], name=node.name)
    last.metadata_props.extend(node.metadata_props)
    return [*made.nodes, last]


class _Nodes:
    """The nodes of a check."""

    def __init__(self, name: str) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._name = name

    def add(self, operator: str, *inputs: str) -> str:
        name = f"{self._name}/{len(self.nodes)}_{operator}"
        self.nodes.append(helper.make_node(operator, inputs, [name], name=name))
        return name

    def number(self, value: int) -> str:
        name = f"{self._name}/{len(self.nodes)}_number"
        self.nodes.append(constant(name, np.array(value)))
        return name

    def check_index(self, check: Check, index: str, tensors: list[str]) -> str:
        if check.low is None:
            # ONNX's Gather counts from the end, too, and checks the range.
            return self._looked_up(check, tensors, index) if check.exact else index
        distance = index if check.low == 0 else self.add("Sub", index, self.number(check.low))
        wrong = self.add("Less", distance, self.number(0))
        if check.ignored is not None:
            allowed = self.add("Equal", index, self.number(check.ignored))
            wrong = self.add("And", wrong, self.add("Not", allowed))
        if check.size == BOUNDLESS and check.exact:
            # There is no table of that size, but one with a single zero.
            place = self.add("Where", wrong, self.number(-_FAR), self.number(0))
            table = self.add("Range", self.number(0), self.number(1), self.number(1))
            return self.add("Add", index, self.add("Gather", table, place))
        far = self.add("Sub", distance, self.number(_FAR))
        moved = self.add("Where", wrong, far, distance)
        return self._looked_up(check, tensors, moved) if check.exact else moved

    def _looked_up(self, check: Check, tensors: list[str], index: str) -> str:
        """Return the element at a position of the table of valid indices."""
        if check.source is None:
            size = self.number(check.size or 0)
        elif check.dim is None:
            size = self.add("Size", tensors[check.source])
        else:
            size = self.add("Gather", self.add("Shape", tensors[check.source]), self.number(check.dim))
        table = self.add("Range", self.number(check.low or 0), size, self.number(1))
        return self.add("Gather", table, index)
