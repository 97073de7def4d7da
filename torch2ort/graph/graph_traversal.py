"""The PythonOp nodes of a graph."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator

import onnx

from torch2ort.errors import ModelLoadError
from torch2ort.pythonop import Site, load_node

# Where the PythonOpGrad node of a file says the name of the PythonOp node whose backward it runs.
FORWARD_ATTRIBUTE = "forward_node"
# Metadata of a node with a body (graph/function_calls.py).
CALL_META = "torch2ort.call"
# Functions of the user's, and PyTorch's own kernels.
_OPERATORS = frozenset({("com.microsoft", "PythonOp"), ("org.pytorch.aten", "ATen")})


def python_op_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Every PythonOp node, in the graph and in the bodies of its If, Loop and Scan nodes."""
    for node in graph.node:
        if (node.domain, node.op_type) in _OPERATORS:
            yield node
        for body in bodies(node):
            yield from python_op_nodes(body)


def function_of(node: onnx.NodeProto) -> str:
    """The ``func_name`` of the Function that a node calls, or has the body of; empty if it does neither."""
    name = next((a.s.decode() for a in node.attribute if a.name == "func_name"), "")
    text = "" if name else text_of_call(node)
    return str(json.loads(text).get("func_name", "")) if text else name


def text_of_call(node: onnx.NodeProto) -> str:
    """The exact call that a node has the body of; empty if it has none."""
    return next((prop.value for prop in node.metadata_props if prop.key == CALL_META), "")


def values_read(graph: onnx.GraphProto) -> Iterator[str]:
    """The value of each input of a node and each output of the graph, and those that bodies read."""
    yield from (value.name for value in graph.output)
    for node in graph.node:
        yield from node.input
        for body in bodies(node):
            yield from values_read(body)


def graphs_in(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph, and the bodies of its nodes behind it."""
    yield graph
    for node in graph.node:
        for body in bodies(node):
            yield from graphs_in(body)


def bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs among a node's attributes."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs


def ancestors(graph: onnx.GraphProto, names: Iterable[str], stop: Collection[str] = ()) -> set[str]:
    """The values of these names, and all that they are computed from.

    Args:
        graph: nodes without bodies.
        names: values of the graph.
        stop: operators whose inputs do not count.
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
    """The site of each PythonOp node by the node's name, not yet bound to classes.

    Raises:
        ModelLoadError: a node's site is missing or damaged, its attributes say something else, or two nodes
            share a name.
    """
    sites: dict[str, Site] = {}
    for node in python_op_nodes(graph):
        if node.name in sites:
            raise ModelLoadError(
                f"two PythonOp nodes share the name '{node.name}', by which their sites are told apart; "
                f"give each node a name of its own"
            )
        sites[node.name] = load_node(node)
    return sites


def copied(node: onnx.NodeProto) -> onnx.NodeProto:
    """The node outside of its graph, which frees those that it drops."""
    made = onnx.NodeProto()
    made.CopyFrom(node)
    return made


def opset_of(model: onnx.ModelProto) -> int:
    """The version of ONNX's own operators; 0 where a model imports none."""
    return next((entry.version for entry in model.opset_import if not entry.domain), 0)
