"""Numbers of double precision that torch.onnx writes in float32, where they lose digits."""

from __future__ import annotations

import ctypes
import functools
import math

import onnx
import onnx_ir as ir


def survives_float(number: float) -> bool:
    """Return True if float32 represents ``number`` exactly."""
    return math.isnan(number) or ctypes.c_float(number).value == number


def looks_rounded(number: float) -> bool:
    """Return True if ``number`` uses all digits of a float32, as 0.3 does in float32.

    Halves, integers and other numbers that a float32 represents exactly have few digits.
    """
    if not math.isfinite(number) or not survives_float(number):
        return False
    mantissa = abs(math.frexp(number)[0])
    return mantissa * 2**16 != int(mantissa * 2**16)


def loses_digits(node: ir.Node) -> bool:
    """Return True if a node with a double result computes it from rounded constants or attributes."""
    if node.outputs[0].dtype != ir.DataType.DOUBLE:
        return False
    if not node.domain and _has_float_attributes(node.op_type):
        return True
    return any(v is not None and v.dtype == ir.DataType.FLOAT and is_rounded(v) for v in node.inputs)


@functools.cache
def _has_float_attributes(op_type: str) -> bool:
    if not onnx.defs.has(op_type):
        return False
    attributes = onnx.defs.get_schema(op_type).attributes.values()
    return any(attribute.type == onnx.defs.OpSchema.AttrType.FLOAT for attribute in attributes)


def is_rounded(value: ir.Value) -> bool:
    """Return True if a value is one constant number that looks rounded to float32."""
    tensor = ir.convenience.get_const_tensor(value)
    return tensor is not None and tensor.size == 1 and looks_rounded(float(tensor.numpy().reshape(())))
