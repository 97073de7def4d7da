"""LSTM and GRU over an empty batch: onnxruntime divides by the batch size, and the process ends.

Where the batch may be empty, the node is put into a branch that does not run then. The defect was seen on
onnxruntime 1.19.2 to 1.31.1; RNN is correct.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx
from onnx import helper

from torch2ort.runtime.replace_nodes import branch, constant, replace_nodes, unless

_RECURRENT = ("LSTM", "GRU")
# Dimensions of the input: steps, batch, features.
_BATCH = 1


def guard_recurrent(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return ``model``, or a copy that runs a recurrent layer only over a batch that has elements."""
    return replace_nodes(model, _is_recurrent, _guarded)


def _is_recurrent(node: onnx.NodeProto) -> bool:
    return node.op_type in _RECURRENT and not node.domain


def _guarded(node: onnx.NodeProto, shapes: Mapping[str, list[int]]) -> Iterator[onnx.NodeProto]:
    if shapes.get(node.input[0], [0, 0, 0])[_BATCH] > 0:
        yield node
        return
    name = f"{next(filter(None, node.output))}/guard"
    made = [
        helper.make_node("Shape", [node.input[0]], [f"{name}/sizes"]),
        helper.make_node("Gather", [f"{name}/sizes", f"{name}/position"], [f"{name}/batch"]),
        helper.make_node("Equal", [f"{name}/batch", f"{name}/zero"], [f"{name}/empty"]),
    ]
    for part in made:
        part.name = part.output[0]
    yield constant(f"{name}/position", np.array([_BATCH]))
    yield constant(f"{name}/zero", np.array([0]))
    yield from made
    yield unless(f"{name}/empty", node, name, _of_nothing(node, f"{name}/then", f"{name}/sizes"))


def _of_nothing(node: onnx.NodeProto, name: str, sizes: str) -> onnx.GraphProto:
    """Return the results without elements: the outputs of all steps, and the last states."""
    settings = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    directions = 2 if settings.get("direction") == b"bidirectional" else 1
    nodes = [
        constant(f"{name}/first", np.array([0])),
        helper.make_node("Gather", [sizes, f"{name}/first"], [f"{name}/steps"], name=f"{name}/steps"),
        constant(f"{name}/state", np.array([directions, 0, settings["hidden_size"]])),
        helper.make_node(
            "Concat", [f"{name}/steps", f"{name}/state"], [f"{name}/every"], name=f"{name}/every", axis=0
        ),
    ]
    results = [f"{name}/result_{i}" for i in range(len(node.output))]
    for i, result in enumerate(results):
        shape = f"{name}/state" if i else f"{name}/every"
        # The input, which has no elements, gives the results their dtype.
        nodes.append(helper.make_node("Reshape", [node.input[0], shape], [result], name=result, allowzero=1))
    return branch(name, nodes, results)
