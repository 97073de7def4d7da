"""Pools that keep NaN, and minus infinity.

onnxruntime's MaxPool passes NaN over, which in PyTorch is the greatest number, and takes a window of minus
infinity alone for the smallest number. A second pool, over the kinds of numbers, tells such windows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from torch2ort.graph.exact_nodes import NAN, is_exact
from torch2ort.runtime.replace_nodes import replace_nodes


def guard_pools(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model``, or a copy of it whose marked pools keep NaN and minus infinity."""
    return replace_nodes(model, _is_marked, _guarded)


def _is_marked(node: onnx.NodeProto) -> bool:
    return node.op_type == "MaxPool" and is_exact(node, NAN)


def _guarded(node: onnx.NodeProto, shapes: Mapping[str, list[int]]) -> list[onnx.NodeProto]:
    source, result = node.input[0], node.output[0]
    made: list[onnx.NodeProto] = []

    def add(operator: str, *inputs: str) -> str:
        name = f"{result}/{len(made)}_{operator}"
        made.append(helper.make_node(operator, inputs, [name], name=name))
        return name

    def number(value: float) -> str:
        name = f"{result}/{len(made)}_number"
        tensor = numpy_helper.from_array(np.array(value, np.float32))
        made.append(helper.make_node("Constant", [], [name], name=name, value=tensor))
        return name

    # In the type of the input, which is float or double.
    nan, smallest = (add("CastLike", number(value), source) for value in (math.nan, -math.inf))
    none, one, nans = (number(kind) for kind in (0.0, 1.0, 2.0))
    is_number = add("Where", add("Greater", source, smallest), one, none)
    kinds = add("Where", add("IsNaN", source), nans, is_number)
    found = add("MaxPool", kinds)
    made[-1].attribute.extend(node.attribute)
    special = add("Where", add("Greater", found, one), nan, smallest)
    is_special = add("Not", add("Equal", found, one))
    pool = onnx.NodeProto()
    pool.CopyFrom(node)
    pool.output[0] = f"{result}/pooled"
    last = helper.make_node("Where", [is_special, special, pool.output[0]], [result], name=f"{result}/exact")
    return [*made, pool, last]
