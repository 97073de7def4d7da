"""Parts of the nodes that choose between two branches, where an operator cannot have some tensors."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper


def branch(name: str, nodes: list[onnx.NodeProto], outputs: list[str]) -> onnx.GraphProto:
    """A branch of an If, which reads what it needs from outside."""
    return helper.make_graph(nodes, name, [], [onnx.ValueInfoProto(name=output) for output in outputs])


def constant(name: str, value: np.ndarray) -> onnx.NodeProto:
    """A node that gives int64 numbers."""
    tensor = numpy_helper.from_array(value.astype(np.int64))
    return helper.make_node("Constant", [], [name], name=name, value=tensor)


def outputs_of(node: onnx.NodeProto, name: str) -> list[str]:
    """The outputs of a node, with names for those that nobody reads: an If has no optional ones."""
    return [output or f"{name}/unread_{i}" for i, output in enumerate(node.output)]


def known_shapes(graph: onnx.GraphProto) -> dict[str, list[int]]:
    """Sizes of each value whose rank is known; 0 for one that varies."""
    values = (*graph.input, *graph.output, *graph.value_info)
    found = {
        v.name: [d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in values
        if v.type.tensor_type.HasField("shape")
    }
    return found | {tensor.name: list(tensor.dims) for tensor in graph.initializer}
