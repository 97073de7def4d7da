"""The element types of a graph's values, derived from the graph's inputs by ONNX's schemas."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnx_ir as ir

from torch2ort.symbolics.kernel_types import kernel_types

# Attributes that contain an output's type.
_OF_OUTPUT = ("to", "dtype", "output_datatype")


@dataclass(frozen=True, slots=True)
class Typed:
    """A node and the types of its tensors.

    Attributes:
        node: the node.
        inputs: type variable of each input, ``""`` where the schema has none.
        outputs: the same of each output.
        types: type of each variable that is known.
        mixed: variables whose tensors have several types.
        mistyped: True if an output has another type than in the program.
    """

    node: ir.Node
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    types: dict[str, ir.DataType]
    mixed: frozenset[str]
    mistyped: bool


def typed_nodes(model: ir.Model) -> Iterator[Typed]:
    """Yield every node of ONNX's own operators, and of those whose kernels are known, in order.

    The type of each value without one is set on the way.
    """
    opset = model.opset_imports[""]
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        signature = _signature(node, opset)
        if signature is None:
            continue
        typed = _bind(node, *signature)
        for value, variable in zip(node.outputs, typed.outputs, strict=True):
            if value.dtype is None and variable in typed.types:
                value.dtype = typed.types[variable]
        yield typed


def operator_name(node: ir.Node) -> str:
    """Return the operator with its domain in front, unless the domain is ONNX's own."""
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type


def _signature(node: ir.Node, opset: int) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]] | None:
    """Return the type variable of each input and output, and the variables that allow a single type."""
    if node.domain:
        if kernel_types(operator_name(node)) is None:
            return None
        return ("T",) * len(node.inputs), ("T",) * len(node.outputs), {}
    schema = _schema(node.op_type, opset)
    if schema is None:
        return None
    single = {
        c.type_param_str: _DATA_TYPES[c.allowed_type_strs[0]]
        for c in schema.type_constraints
        if len(c.allowed_type_strs) == 1 and c.allowed_type_strs[0] in _DATA_TYPES
    }
    return _variables(schema.inputs, len(node.inputs)), _variables(schema.outputs, len(node.outputs)), single


@functools.cache
def _schema(op_type: str, opset: int) -> Any:
    try:
        return onnx.defs.get_schema(op_type, opset)
    except onnx.defs.SchemaError:
        return None


def _variables(formals: Sequence[Any], count: int) -> tuple[str, ...]:
    # The last formal parameter may be variadic.
    every = [*formals, *(formals[-1] for _ in range(count - len(formals)))]
    return tuple(f.type_str if f.is_homogeneous else "" for f in every[:count])


_DATA_TYPES = {
    f"tensor({name})": kind
    for name, kind in (
        ("float", ir.DataType.FLOAT),
        ("bool", ir.DataType.BOOL),
        ("int32", ir.DataType.INT32),
        ("int64", ir.DataType.INT64),
    )
}


def _bind(
    node: ir.Node, inputs: tuple[str, ...], outputs: tuple[str, ...], single: dict[str, ir.DataType]
) -> Typed:
    types = dict(single)
    mixed = set()
    for value, variable in zip(node.inputs, inputs, strict=True):
        if value is None or value.dtype is None or not variable:
            continue
        if types.setdefault(variable, value.dtype) != value.dtype:
            mixed.add(variable)
    mistyped = False
    for value, variable in zip(node.outputs, outputs, strict=True):
        made = types.get(variable) or _DATA_TYPES.get(variable) or _said(node)
        if made is None and value.dtype is not None:
            made = value.dtype
        if made is None or not variable:
            continue
        types.setdefault(variable, made)
        mistyped |= value.dtype is not None and value.dtype != made
    return Typed(node, inputs, outputs, types, frozenset(mixed), mistyped)


def _said(node: ir.Node) -> ir.DataType | None:
    """Return the output's type according to an attribute."""
    for name in _OF_OUTPUT:
        if name in node.attributes and node.attributes[name].type == ir.AttributeType.INT:
            return ir.DataType(node.attributes[name].as_int())
    if node.op_type == "ConstantOfShape":
        value = node.attributes.get("value")
        return ir.DataType.FLOAT if value is None else value.as_tensor().dtype
    return None
