"""Registered gradients, put where onnxruntime-training finds them.

It keeps one gradient per operator and process, the first that it is given. So each node whose operator has
a registered gradient is replaced, while the gradient graph is built, by an ATen node, and for those it
keeps one gradient per name: ours is new each time.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import onnx
import onnx_ir as ir

from torch2ort.runtime import training_pybind
from torch2ort.symbolics.registered.gradient_definitions import GradientDefinition, GradientNode, gradient_of

_DOMAIN, _OPERATOR = "org.pytorch.aten", "ATen"
_serial = itertools.count()


def hide_operators(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    """Replace nodes with a registered gradient by stand-ins that have it, in place.

    Returns:
        The replaced nodes, by the name of the stand-in's operator.
    """
    definitions: dict[str, GradientDefinition] = {}
    for node in ir.from_proto(model).graph:
        definition = gradient_of(node)
        if definition is not None and node.outputs[0].name:
            definitions[node.outputs[0].name] = definition
    hidden: dict[str, onnx.NodeProto] = {}
    for node in model.graph.node if definitions else ():
        definition = definitions.get(node.output[0])
        if definition is None:
            continue
        name = f"torch2ort_{next(_serial)}"
        hidden[name] = onnx.NodeProto()
        hidden[name].CopyFrom(node)
        _register(name, definition)
        node.domain, node.op_type = _DOMAIN, _OPERATOR
        del node.attribute[:]
        node.attribute.append(onnx.helper.make_attribute("operator", name))
        node.attribute.append(onnx.helper.make_attribute("overload_name", ""))
    if hidden and _DOMAIN not in {o.domain for o in model.opset_import}:
        model.opset_import.append(onnx.helper.make_opsetid(_DOMAIN, 1))
    return hidden


def restore_operators(graph: onnx.GraphProto, hidden: Mapping[str, onnx.NodeProto]) -> None:
    """Undo :func:`hide_operators` in the graph that was built, in place."""
    for node in graph.node:
        if (node.domain, node.op_type) != (_DOMAIN, _OPERATOR):
            continue
        name = next((a.s.decode() for a in node.attribute if a.name == "operator"), "")
        if name in hidden:
            original = hidden[name]
            node.domain, node.op_type = original.domain, original.op_type
            del node.attribute[:]
            node.attribute.extend(original.attribute)


def _register(name: str, definition: GradientDefinition) -> None:
    ort = training_pybind()
    ort.register_gradient_definition(
        f"{_DOMAIN}::{_OPERATOR}::{name}::", [_node(ort, node) for node in definition.nodes]
    )


def _node(ort: Any, node: GradientNode) -> Any:
    made = ort.GradientNodeDefinition()
    made.op_type, made.domain = node.op_type, node.domain
    made.inputs, made.outputs = list(node.inputs), list(node.outputs)
    attributes = []
    for attribute in node.attributes:
        described = ort.GradientNodeAttributeDefinition()
        described.name, described.value_json = attribute.name, attribute.json
        described.dtype, described.is_tensor = attribute.dtype, attribute.is_tensor
        attributes.append(described)
    made.attributes = attributes
    return made
