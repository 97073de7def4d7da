"""Other nodes in the places of some, such as a branch for the tensors that an operator cannot have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from torch2ort.graph.graph_traversal import graphs_in


def replace_nodes(
    model: onnx.ModelProto,
    is_meant: Callable[[onnx.NodeProto], bool],
    others: Callable[[onnx.NodeProto, Mapping[str, list[int]]], Iterable[onnx.NodeProto]],
) -> onnx.ModelProto:
    """``model``, or a copy of it with other nodes in the places of some.

    Args:
        model: the model; it is not changed.
        is_meant: whether a node may need others in its place.
        others: those, given it and the sizes that :func:`known_shapes` tells.
    """
    if not any(is_meant(node) for graph in graphs_in(model.graph) for node in graph.node):
        return model
    made = onnx.ModelProto()
    made.CopyFrom(model)
    # Inner graphs first, and none of those that are made here.
    for graph in reversed(list(graphs_in(made.graph))):
        shapes = known_shapes(graph)
        nodes = [part for n in graph.node for part in (others(n, shapes) if is_meant(n) else [n])]
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


def unless(condition: str, node: onnx.NodeProto, name: str, otherwise: onnx.GraphProto) -> onnx.NodeProto:
    """An If of this name that runs ``node`` unless a condition holds.

    Args:
        condition: the name of a bool.
        node: a node; it is not changed.
        name: of the If.
        otherwise: the branch that is taken where the condition holds: as many results as the node has.
    """
    inner = onnx.NodeProto()
    inner.CopyFrom(node)
    inner.output[:] = [f"{name}/else/{i}" for i in range(len(node.output))]
    # An If has no optional outputs.
    outputs = [output or f"{name}/unread_{i}" for i, output in enumerate(node.output)]
    run = branch(f"{name}/else", [inner], list(inner.output))
    return helper.make_node("If", [condition], outputs, name=name, then_branch=otherwise, else_branch=run)


def known_shapes(graph: onnx.GraphProto) -> dict[str, list[int]]:
    """Sizes of each value whose rank is known; 0 for one that varies."""
    values = (*graph.input, *graph.output, *graph.value_info)
    found = {
        v.name: [d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in values
        if v.type.tensor_type.HasField("shape")
    }
    return found | {tensor.name: list(tensor.dims) for tensor in graph.initializer}
