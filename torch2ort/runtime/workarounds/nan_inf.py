"""NaN and infinity in reductions, pools, sorting, Erf and Sign.

onnxruntime ignores NaN, which in PyTorch is the result or the greatest value. It computes the maximum of a
window that contains only minus infinity as the smallest finite number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from torch2ort.graph.exact_nodes import NAN_META, nan_type
from torch2ort.runtime.replace_nodes import replace_nodes

# Other dtypes have no kernels for some of the nodes; narrower ones are exact in float.
_TYPES = {"DOUBLE": np.dtype(np.float64)}
_FLOAT = np.dtype(np.float32)


def keep_nan(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return ``model``, or a copy whose marked nodes treat NaN and infinity as PyTorch does."""
    return replace_nodes(model, _is_marked, _guarded)


def _is_marked(node: onnx.NodeProto) -> bool:
    return node.op_type in _REWRITES and nan_type(node) is not None


def _guarded(node: onnx.NodeProto, shapes: Mapping[str, list[int]]) -> list[onnx.NodeProto]:
    element = nan_type(node) or ""
    rewriter = _Rewriter(node, _TYPES.get(element, _FLOAT))
    if element in ("FLOAT", "DOUBLE"):
        rewriter.name_result(_REWRITES[node.op_type](rewriter, node.input[0]))
    else:
        found = _REWRITES[node.op_type](rewriter, rewriter.cast(node.input[0], TensorProto.FLOAT))
        is_index = node.op_type in ("ArgMax", "ArgMin")
        rewriter.name_result(found if is_index else rewriter.add("CastLike", found, node.input[0]))
    return rewriter.nodes


class _Rewriter:
    """The nodes that replace one node."""

    def __init__(self, node: onnx.NodeProto, dtype: np.dtype) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._node = node
        self._dtype = dtype

    def reduction(self, source: str) -> str:
        """Return NaN where there is one."""
        found = self._similar("ReduceMax", self._flags(source), *self._node.input[1:])
        return self.add("Where", self._truth(found), self._number(math.nan), self._itself(source))

    def position(self, source: str) -> str:
        """Return the position of the first NaN where there is one."""
        flags = self._flags(source)
        axis = next((a.i for a in self._node.attribute if a.name == "axis"), 0)
        keep = next((a.i for a in self._node.attribute if a.name == "keepdims"), 1)
        found = self.add("ReduceMax", flags, self._constant(np.array([axis])), keepdims=keep)
        return self.add("Where", self._truth(found), self._similar("ArgMax", flags), self._itself(source))

    def pool(self, source: str) -> str:
        """Return NaN where there is one in the window, and minus infinity where there is nothing else."""
        nan, smallest = self._number(math.nan), self._number(-math.inf)
        none, one, nans = (self._constant(np.array(kind, np.float32)) for kind in (0, 1, 2))
        is_number = self.add("Where", self.add("Greater", source, smallest), one, none)
        kinds = self.add("Where", self.add("IsNaN", source), nans, is_number)
        found = self._similar("MaxPool", kinds)
        special = self.add("Where", self.add("Greater", found, one), nan, smallest)
        return self.add("Where", self.add("Equal", found, one), self._itself(source), special)

    def order(self, source: str) -> str:
        """Sort NaN as greater than infinity, and infinity as the greatest number."""
        finite = self.add("Min", source, self._number(np.finfo(self._dtype).max))
        comparable = self.add("Where", self.add("IsNaN", source), self._number(math.inf), finite)
        self._itself(comparable)
        axis = next((a.i for a in self._node.attribute if a.name == "axis"), -1)
        return self.add("GatherElements", source, self._node.output[1], axis=axis)

    def erf(self, source: str) -> str:
        """Return NaN for NaN instead of one."""
        return self.add("Where", self.add("IsNaN", source), source, self._itself(source))

    def sign(self, source: str) -> str:
        """Return zero for NaN."""
        return self.add("Where", self.add("IsNaN", source), self._number(0), self._itself(source))

    def cast(self, source: str, to: int) -> str:
        return self.add("Cast", source, to=to)

    def name_result(self, value: str) -> None:
        """Give the output of the last node the name of the node's result."""
        (last,) = self.nodes[-1:]
        assert list(last.output) == [value]
        last.output[0] = self._node.output[0]

    def add(self, operator: str, *inputs: str, **attributes: int) -> str:
        name = self._name(operator)
        made = helper.make_node(operator, inputs, [name], name=name)
        made.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
        self.nodes.append(made)
        return name

    def _itself(self, source: str) -> str:
        """Return a copy of the node, with another input and another name of its first result."""
        made = onnx.NodeProto()
        made.CopyFrom(self._node)
        made.input[0] = source
        name = made.output[0] = self._name(self._node.op_type)
        for mark in [prop for prop in made.metadata_props if prop.key == NAN_META]:
            made.metadata_props.remove(mark)
        self.nodes.append(made)
        return name

    def _similar(self, operator: str, *inputs: str) -> str:
        """Return a node of another operator with the node's attributes."""
        found = self.add(operator, *inputs)
        self.nodes[-1].attribute.extend(self._node.attribute)
        return found

    def _flags(self, source: str) -> str:
        return self.cast(self.add("IsNaN", source), TensorProto.FLOAT)

    def _truth(self, flags: str) -> str:
        return self.cast(flags, TensorProto.BOOL)

    def _number(self, value: float) -> str:
        return self._constant(np.array(value, self._dtype))

    def _constant(self, value: np.ndarray) -> str:
        name = self._name("Constant")
        made = helper.make_node("Constant", [], [name], name=name, value=numpy_helper.from_array(value))
        self.nodes.append(made)
        return name

    def _name(self, operator: str) -> str:
        return f"{self._node.output[0]}/{len(self.nodes)}_{operator}"


_REWRITES: dict[str, Callable[[_Rewriter, str], str]] = {
    "ReduceMax": _Rewriter.reduction,
    "ReduceMin": _Rewriter.reduction,
    "ArgMax": _Rewriter.position,
    "ArgMin": _Rewriter.position,
    "MaxPool": _Rewriter.pool,
    "TopK": _Rewriter.order,
    "Erf": _Rewriter.erf,
    "Sign": _Rewriter.sign,
}
