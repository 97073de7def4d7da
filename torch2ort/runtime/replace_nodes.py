"""Replacement of nodes, for example by a branch for tensors that an operator does not support."""

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
    """Return ``model``, or a copy of it in which some nodes are replaced.

    Args:
        model: the model; it is not changed.
        is_meant: returns True for a node that may be replaced.
        others: returns the nodes in its place, given it and the sizes of :func:`known_shapes`.
    """
    if not any(is_meant(node) for graph in graphs_in(model.graph) for node in graph.node):
        return model
    made = onnx.ModelProto()
    made.CopyFrom(model)
    # Inner graphs first, so the graphs that are made here are not visited.
    for graph in reversed(list(graphs_in(made.graph))):
        shapes = known_shapes(graph)
        nodes = [part for n in graph.node for part in (others(n, shapes) if is_meant(n) else [n])]
        del graph.node[:]
        graph.node.extend(nodes)
    return made


def branch(name: str, nodes: list[onnx.NodeProto], outputs: list[str]) -> onnx.GraphProto:
    """Return a branch of an If, which reads values of the outer graph."""
    return helper.make_graph(nodes, name, [], [onnx.ValueInfoProto(name=output) for output in outputs])


def constant(name: str, value: np.ndarray) -> onnx.NodeProto:
    """Return a constant node of int64 numbers."""
    tensor = numpy_helper.from_array(value.astype(np.int64))
    return helper.make_node("Constant", [], [name], name=name, value=tensor)


def unless(condition: str, node: onnx.NodeProto, name: str, otherwise: onnx.GraphProto) -> onnx.NodeProto:
    """Return an If that runs ``node`` unless a condition holds.

    Args:
        condition: the name of a bool.
        node: a node; it is not changed.
        name: name of the If.
        otherwise: the branch for the case that the condition holds, with as many results as the node has.
    """
    inner = onnx.NodeProto()
    inner.CopyFrom(node)
    inner.output[:] = [f"{name}/else/{i}" for i in range(len(node.output))]
    # An If has no optional outputs.
    outputs = [output or f"{name}/unread_{i}" for i, output in enumerate(node.output)]
    run = branch(f"{name}/else", [inner], list(inner.output))
    return helper.make_node("If", [condition], outputs, name=name, then_branch=otherwise, else_branch=run)


def known_shapes(graph: onnx.GraphProto) -> dict[str, list[int]]:
    """Return the sizes of each value whose rank is known; 0 for a size that varies."""
    values = (*graph.input, *graph.output, *graph.value_info)
    found = {
        v.name: [d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in values
        if v.type.tensor_type.HasField("shape")
    }
    return found | {tensor.name: list(tensor.dims) for tensor in graph.initializer}
