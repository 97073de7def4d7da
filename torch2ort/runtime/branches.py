"""Parts of the nodes that choose between two branches, where an operator cannot have some tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from torch2ort.graph.nodes import graphs_in


def guard_nodes(
    model: onnx.ModelProto,
    is_asked: Callable[[onnx.NodeProto], bool],
    guarded: Callable[[onnx.NodeProto, Mapping[str, list[int]]], Iterable[onnx.NodeProto]],
) -> onnx.ModelProto:
    """``model``, or a copy of it with other nodes in the places of some.

    Args:
        model: the model; it is not changed.
        is_asked: whether a node may need others in its place.
        guarded: those, given it and the sizes that :func:`known_shapes` tells.
    """
    if not any(is_asked(node) for graph in graphs_in(model.graph) for node in graph.node):
        return model
    made = onnx.ModelProto()
    made.CopyFrom(model)
    # Inner graphs first, and none of those that are made here.
    for graph in reversed(list(graphs_in(made.graph))):
        shapes = known_shapes(graph)
        nodes = [part for n in graph.node for part in (guarded(n, shapes) if is_asked(n) else [n])]
        del graph.node[:]
        graph.node.extend(nodes)
    return made


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
