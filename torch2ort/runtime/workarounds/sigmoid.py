"""Sigmoids that are correct where they are small.

onnxruntime's sigmoid is zero from -18 on, in every version. PyTorch's is 1.5e-8 there, far from the smallest
number of float32; the logarithm of zero would be infinite. The quotient that defines the sigmoid is exact
there.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from torch2ort.runtime.replace_nodes import replace_nodes


def divide_sigmoids(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return ``model``, or a copy with quotients instead of sigmoids."""
    return replace_nodes(model, _is_sigmoid, _quotient)


def _is_sigmoid(node: onnx.NodeProto) -> bool:
    return node.op_type == "Sigmoid" and not node.domain


def _quotient(node: onnx.NodeProto, shapes: Mapping[str, list[int]]) -> list[onnx.NodeProto]:
    (source,), (result,) = node.input, node.output
    one, minus, power, more = (f"{result}/{part}" for part in ("one", "minus", "power", "more"))
    number = numpy_helper.from_array(np.array(1, np.float32))
    made = [
        helper.make_node("Constant", [], [f"{one}/float"], value=number),
        # In the dtype of the input.
        helper.make_node("CastLike", [f"{one}/float", source], [one]),
        helper.make_node("Neg", [source], [minus]),
        helper.make_node("Exp", [minus], [power]),
        helper.make_node("Add", [power, one], [more]),
        helper.make_node("Div", [one, more], [result]),
    ]
    for part in made:
        part.name = part.output[0]
    return made
