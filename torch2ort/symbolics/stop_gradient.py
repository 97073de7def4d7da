"""Stop-gradients: a function of the graph's own, which an engine may know as something else."""

from __future__ import annotations

import onnx_ir as ir

_DOMAIN = "torch2ort"
_NAME = "StopGradient"
STOP_GRADIENT = f"{_DOMAIN}::{_NAME}"


def define_stop_gradient(model: ir.Model, opset: int) -> None:
    """Give ``model`` the function ``torch2ort::StopGradient``, so that any runtime can run it."""
    if not any(is_stop(node) for node in model.graph):
        return
    value = ir.Value(name="x")
    node = ir.Node("", "Identity", [value], num_outputs=1, name="identity")
    node.outputs[0].name = "y"
    graph = ir.Graph([value], [node.outputs[0]], nodes=[node], opset_imports={"": opset}, name=_NAME)
    function = ir.Function(_DOMAIN, _NAME, graph=graph, attributes=[])
    model.functions[function.identifier()] = function
    model.opset_imports[_DOMAIN] = 1


def forget_stop_gradient(model: ir.Model) -> None:
    """Undo :func:`define_stop_gradient` in a graph that has such nodes no longer."""
    model.functions.pop((_DOMAIN, _NAME, ""), None)
    model.opset_imports.pop(_DOMAIN, None)


def stop_node(value: ir.Value) -> ir.Node:
    """A node with the same values, through which no gradient goes."""
    floating = value.dtype is None or value.dtype.is_floating_point()
    domain, name = (_DOMAIN, _NAME) if floating else ("", "Identity")
    node = ir.Node(domain, name, [value], num_outputs=1, version=1 if floating else None)
    node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
    return node


def is_stop(node: ir.Node) -> bool:
    """Whether ``node`` ends the gradient."""
    return node.domain == _DOMAIN and node.op_type == _NAME
