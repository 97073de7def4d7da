"""Gradients that users register for ONNX operators, as lists of nodes by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, overload

import onnx_ir as ir
import torch

from torch2ort.errors import ExportError
from torch2ort.pythonop.registry import gradients


@dataclass(frozen=True, slots=True)
class GradientAttribute:
    """An attribute of a node of a gradient.

    Attributes:
        name: name of the attribute.
        json: its value.
        dtype: ``int``, ``float``, ``bool``, ``string``, or the element type of an input or output.
        is_tensor: True for a tensor, False for a number or list.
    """

    name: str
    json: str
    dtype: str
    is_tensor: bool


@dataclass(frozen=True, slots=True)
class GradientNode:
    """A node of a gradient.

    Attributes:
        op_type: operator.
        domain: its domain, ``""`` for ONNX's own.
        inputs: names; ``I(0)``, ``O(0)``, ``GO(0)`` are an input, an output, and an output's gradient of the
            operator that is differentiated.
        outputs: names; ``GI(0)`` is an input's gradient.
        attributes: attributes of the node.
    """

    op_type: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[GradientAttribute, ...]


@dataclass(frozen=True, slots=True)
class GradientDefinition:
    """The gradient of one node.

    Attributes:
        nodes: its nodes, in order.
        inputs: positions of the inputs that have a gradient.
    """

    nodes: tuple[GradientNode, ...]
    inputs: frozenset[int]


@dataclass(frozen=True, slots=True)
class GradientValue:
    """A tensor inside a gradient: pass it to ``g.op``."""

    name: str


class GradientBuilder:
    """``g`` of a gradient, which collects the nodes of its definition."""

    def __init__(self, who: str) -> None:
        self.nodes: list[GradientNode] = []
        self._who = who
        self._count = 0

    @overload
    def op(self, name: str, *inputs: Any, outputs: Literal[1] = 1, **attributes: Any) -> GradientValue: ...
    @overload
    def op(self, name: str, *inputs: Any, outputs: int, **attributes: Any) -> tuple[GradientValue, ...]: ...
    def op(
        self, name: str, *inputs: Any, outputs: int = 1, **attributes: Any
    ) -> GradientValue | tuple[GradientValue, ...]:
        """Add one node.

        Args:
            name: ``"Mul"``, or ``"domain::Operator"``.
            inputs: values; ``None`` for an absent one. A Python number becomes a constant of the element type
                of the differentiated operator's first input.
            outputs: number of the node's outputs.
            attributes: numbers, strings, or lists of them.

        Returns:
            The output; a tuple of them where ``outputs`` is not 1.

        Raises:
            ExportError: an input or attribute is of another kind.
        """
        domain, _, op_type = name.rpartition("::")
        names = tuple(self._input(name, i, value) for i, value in enumerate(inputs))
        made = tuple(self._name() for _ in range(outputs))
        described = tuple(
            _attribute(self._who, key, value) for key, value in attributes.items() if value is not None
        )
        self.nodes.append(GradientNode(op_type, domain, names, made, described))
        values = tuple(map(GradientValue, made))
        return values[0] if outputs == 1 else values

    def constant(self, value: Any) -> GradientValue:
        """Add an int64 tensor, for axes, shapes and the like.

        Args:
            value: a whole number or a list of them.
        """
        return self._constant(value, "int")

    def _constant(self, value: Any, dtype: str) -> GradientValue:
        made = self._name()
        attribute = GradientAttribute("value", json.dumps(value), dtype, True)
        self.nodes.append(GradientNode("Constant", "", (), (made,), (attribute,)))
        return GradientValue(made)

    def _input(self, name: str, position: int, value: Any) -> str:
        if value is None:
            return ""
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return self._constant(float(value), "IElemType(0)").name
        if not isinstance(value, GradientValue):
            raise ExportError(
                f"{self._who}: input {position} of g.op({name!r}) is {value!r}; expected one of inputs, "
                f"outputs or grads, a value of g.op, a number, or None"
            )
        return value.name

    def _name(self) -> str:
        self._count += 1
        return f"value_{self._count}"


def gradient_of(node: ir.Node) -> GradientDefinition | None:
    """Return the registered gradient of one node; ``None`` if its operator has none.

    Raises:
        ExportError: the registered callable returned no gradient.
    """
    name = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    entry = gradients.find(name)
    return None if entry is None else _define(name, node, entry.value)


def _define(name: str, node: ir.Node, gradient: Callable[..., Any]) -> GradientDefinition:
    builder = GradientBuilder(f"register_gradient('{name}')")
    inputs = tuple(None if v is None else GradientValue(f"I({i})") for i, v in enumerate(node.inputs))
    outputs = tuple(GradientValue(f"O({i})") for i in range(len(node.outputs)))
    grads = tuple(GradientValue(f"GO({i})") for i in range(len(node.outputs)))
    attributes = {key: _python(attribute) for key, attribute in node.attributes.items()}
    returned = gradient(builder, inputs, outputs, grads, **attributes)
    values = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    given = {i: value for i, value in enumerate(values) if value is not None}
    if not given or not all(isinstance(value, GradientValue) for value in given.values()):
        raise ExportError(
            f"register_gradient('{name}'): the gradient returned {returned!r}; expected the gradient of the "
            f"first input, or a tuple with one for each input, None for those that have none"
        )
    if len(values) > len(inputs):
        raise ExportError(
            f"register_gradient('{name}'): the gradient returned {len(values)} gradients for a node with "
            f"{len(inputs)} inputs"
        )
    for i, value in given.items():
        builder.nodes.append(GradientNode("Identity", "", (value.name,), (f"GI({i})",), ()))
    return GradientDefinition(tuple(builder.nodes), frozenset(given))


def _python(attribute: ir.Attr) -> Any:
    value = attribute.value
    return torch.from_numpy(value.numpy()) if isinstance(value, ir.TensorProtocol) else value


def _attribute(who: str, name: str, value: Any) -> GradientAttribute:
    kinds = {bool: "bool", int: "int", float: "float", str: "string"}
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    if type(first) not in kinds:
        raise ExportError(
            f"{who}: attribute {name} is {value!r}; expected a number, a string, or a list of them"
        )
    return GradientAttribute(name, json.dumps(value), kinds[type(first)], False)
