"""A small builder of ONNX nodes for translation functions.

>>> def translate_square(self):
...     return op("Mul", self, self)
>>> def translate_half_gelu(self):
...     return op("Mul", op("com.microsoft::Gelu", self), 0.5)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
import torch

from torch2ort._torch import onnx_exporter as private

Operand: TypeAlias = "ir.Value | bool | int | float | torch.Tensor | np.ndarray[Any, Any] | None"

_TYPED: dict[str, ir.DataType] = {
    **dict.fromkeys(
        (
            "And",
            "Or",
            "Xor",
            "Not",
            "Equal",
            "Less",
            "LessOrEqual",
            "Greater",
            "GreaterOrEqual",
            "IsNaN",
            "IsInf",
        ),
        ir.DataType.BOOL,
    ),
    **dict.fromkeys(("Shape", "Size", "ArgMax", "ArgMin", "NonZero"), ir.DataType.INT64),
}


def op(name: str, *inputs: Operand, dtype: ir.DataType | None = None, **attributes: Any) -> ir.Value:
    """Add one node with one output.

    Args:
        name: operator, with its domain in front (``com.microsoft::Gelu``) unless it is ONNX's own.
        inputs: values, ``None`` for an absent one; Python numbers, arrays and tensors become constants,
            numbers in the element type of the first value among the inputs.
        dtype: element type of the output; by default the operator's fixed output type, else the first
            input's.
        attributes: attributes of the node; those that are ``None`` are left out.
    """
    return ops(name, *inputs, dtypes=(dtype,), **attributes)[0]


def ops(
    name: str, *inputs: Operand, dtypes: Sequence[ir.DataType | None], **attributes: Any
) -> Sequence[ir.Value]:
    """Add one node with ``len(dtypes)`` outputs; otherwise like :func:`op`."""
    domain, _, op_type = name.rpartition("::")
    like = next((v.dtype for v in inputs if isinstance(v, ir.Value)), None)
    values = [_value(v, like) for v in inputs]
    while values and values[-1] is None:
        values.pop()
    node = ir.Node(
        domain,
        op_type,
        values,
        [ir.convenience.convert_attribute(k, v) for k, v in attributes.items() if v is not None],
        num_outputs=len(dtypes),
        version=1 if domain else None,
    )
    private.recorded_nodes().append(node)
    default = _TYPED.get(op_type, like)
    if op_type == "Cast":
        default = ir.DataType(attributes["to"])
    elif op_type == "Where":
        default = next(v.dtype for v in values[1:] if v is not None)
    for value, dtype in zip(node.outputs, dtypes, strict=True):
        _set_type(value, dtype or default)
    return node.outputs


def constant(value: Any, dtype: ir.DataType | None = None) -> ir.Value:
    """Add a constant: a number, a nested list of numbers (int64, float32 or bool), an array, or a tensor."""
    if isinstance(value, torch.Tensor):
        tensor: ir.TensorProtocol = ir.tensor(value.detach().cpu())
    elif isinstance(value, np.ndarray):
        tensor = ir.tensor(value)
    else:
        tensor = ir.tensor(value, dtype=dtype or _natural_type(value))
    node = ir.Node("", "Constant", [], [ir.AttrTensor("value", tensor)], num_outputs=1)
    node.outputs[0].dtype = tensor.dtype
    node.outputs[0].shape = ir.Shape(tensor.numpy().shape)
    private.recorded_nodes().append(node)
    return node.outputs[0]


def _set_type(value: ir.Value, dtype: ir.DataType | None) -> None:
    if dtype is not None:
        value.dtype = dtype


def static_size(value: ir.Value, axis: int) -> int | None:
    """Return the size of ``value`` along ``axis`` if it is a fixed number, else ``None``."""
    size = value.shape[axis] if value.shape is not None else None
    return size if isinstance(size, int) else None


def rank(value: ir.Value) -> int:
    """Return the number of dimensions of ``value``, which torch.export always knows."""
    assert value.shape is not None, f"{value.name} has no shape"
    return len(value.shape)


def size(value: ir.Value, axis: int) -> ir.Value:
    """Return the size of ``value`` along ``axis`` as an int64[1]; a constant where it is fixed."""
    fixed = static_size(value, axis)
    if fixed is not None:
        return constant([fixed])
    axis %= rank(value)
    return op("Shape", value, start=axis, end=axis + 1)


def shape_of(sizes: Sequence[int | ir.Value]) -> ir.Value:
    """Concatenate numbers and int64 values (scalars or vectors) to an int64 vector."""
    if all(isinstance(s, int) for s in sizes):
        return constant(list(sizes), ir.DataType.INT64)
    parts = [constant([s]) if isinstance(s, int) else op("Reshape", s, constant([-1])) for s in sizes]
    return op("Concat", *parts, axis=0) if len(parts) > 1 else parts[0]


def _value(operand: Operand, like: ir.DataType | None) -> ir.Value | None:
    if operand is None or isinstance(operand, ir.Value):
        return operand
    return constant(operand, like if isinstance(operand, (bool, int, float)) else None)


def _natural_type(value: Any) -> ir.DataType:
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    if isinstance(value, bool):
        return ir.DataType.BOOL
    return ir.DataType.FLOAT if isinstance(value, float) else ir.DataType.INT64
