"""Traversal of a graph: its PythonOp nodes, the bodies of its nodes, and the values that are read."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator

import onnx

from torch2ort.errors import ModelLoadError
from torch2ort.pythonop import Site, load_node

# The attribute of a file's PythonOpGrad node with the name of the PythonOp node whose backward it runs.
FORWARD_ATTRIBUTE = "forward_node"
# Metadata of a node with a body (graph/function_calls.py).
CALL_META = "torch2ort.call"
# Calls of the user's Functions, and of PyTorch's own kernels.
_OPERATORS = frozenset({("com.microsoft", "PythonOp"), ("org.pytorch.aten", "ATen")})


def python_op_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield every PythonOp node, in the graph and in the bodies of its If, Loop and Scan nodes."""
    for node in graph.node:
        if (node.domain, node.op_type) in _OPERATORS:
            yield node
        for body in bodies(node):
            yield from python_op_nodes(body)


def function_of(node: onnx.NodeProto) -> str:
    """Return the ``func_name`` of the Function that a node calls, also by a body; empty for other nodes."""
    name = next((a.s.decode() for a in node.attribute if a.name == "func_name"), "")
    text = "" if name else text_of_call(node)
    return str(json.loads(text).get("func_name", "")) if text else name


def text_of_call(node: onnx.NodeProto) -> str:
    """Return the text of the exact call of a node with a body; empty for other nodes."""
    return next((prop.value for prop in node.metadata_props if prop.key == CALL_META), "")


def values_read(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the values that the graph's outputs and its nodes read, including those that bodies read."""
    yield from (value.name for value in graph.output)
    for node in graph.node:
        yield from node.input
        for body in bodies(node):
            yield from values_read(body)


def graphs_in(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph, then the bodies of its nodes."""
    yield graph
    for node in graph.node:
        for body in bodies(node):
            yield from graphs_in(body)


def bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs among a node's attributes."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs


def ancestors(graph: onnx.GraphProto, names: Iterable[str], stop: Collection[str] = ()) -> set[str]:
    """Return the values of these names, and all values that they are computed from.

    Args:
        graph: its nodes have no bodies.
        names: values of the graph.
        stop: operators whose inputs are ignored.
    """
    producers = {name: node for node in graph.node for name in node.output}
    found = set(names)
    pending = list(found)
    while pending:
        node = producers.get(pending.pop())
        if node is not None and node.op_type not in stop:
            new = set(node.input) - found
            found |= new
            pending += new
    return found


def load_sites(graph: onnx.GraphProto) -> dict[str, Site]:
    """Return the site of each PythonOp node by the node's name, not yet bound to classes.

    Raises:
        ModelLoadError: a node's site is missing or damaged, or contradicts its attributes, or two nodes
            share a name.
    """
    sites: dict[str, Site] = {}
    for node in python_op_nodes(graph):
        if node.name in sites:
            raise ModelLoadError(
                f"two PythonOp nodes share the name '{node.name}', which identifies their sites; "
                f"give each node a name of its own"
            )
        sites[node.name] = load_node(node)
    return sites


def copied(node: onnx.NodeProto) -> onnx.NodeProto:
    """Return a copy of the node outside of its graph: a graph frees the nodes that it drops."""
    made = onnx.NodeProto()
    made.CopyFrom(node)
    return made


def opset_of(model: onnx.ModelProto) -> int:
    """Return the opset version of ONNX's own operators; 0 if the model does not import them."""
    return next((entry.version for entry in model.opset_import if not entry.domain), 0)
