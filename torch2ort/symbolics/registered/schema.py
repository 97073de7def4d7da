"""Names, counts and types in ONNX's schema of one of its operators, checked while a graph is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import onnx_ir as ir

from torch2ort.errors import ExportError

_KINDS = onnx.defs.OpSchema.AttrType


class OperatorSchema:
    """The rules of one operator.

    Args:
        op_type: name of one of ONNX's own operators.
        opset: version of ONNX's own operators.
        who: the caller that adds the node, for messages.

    Raises:
        ExportError: ONNX has no such operator at this opset.
    """

    def __init__(self, op_type: str, opset: int, who: str) -> None:
        self._opset = opset
        self._who = who
        self._name = op_type
        try:
            self._schema = onnx.defs.get_schema(op_type, opset, "")
        except onnx.defs.SchemaError:
            if onnx.defs.has(op_type):
                since = onnx.defs.get_schema(op_type).since_version
                reason = (
                    f"came with opset {since}, and the graph is of opset {opset}; export with opset={since}"
                )
            else:
                reason = "is none of ONNX's own; write 'domain::Operator' for one of another domain"
            raise ExportError(f"{who}: the operator {op_type} {reason}") from None

    def check_counts(self, inputs: int, outputs: int) -> None:
        """Raise :class:`ExportError` if the operator does not have that many inputs or outputs."""
        schema = self._schema
        limits = (
            ("inputs", inputs, schema.min_input, schema.max_input),
            ("outputs", outputs, schema.min_output, schema.max_output),
        )
        for what, given, low, high in limits:
            if not low <= given <= high:
                wanted = (
                    f"{low}" if low == high else f"{low} to {high}" if high < 1 << 30 else f"{low} or more"
                )
                raise ExportError(
                    f"{self._who}: {self._name} with {given} {what}; ONNX opset {self._opset} has it with "
                    f"{wanted}"
                )

    def attribute(self, name: str, value: Any) -> Any:
        """Return ``value`` in the type of the operator's attribute.

        Raises:
            ExportError: the operator has no such attribute.
        """
        known = self._schema.attributes
        if name not in known:
            raise ExportError(
                f"{self._who}: {self._name} has no attribute {name!r}; ONNX opset {self._opset} has it with "
                f"{', '.join(sorted(known)) or 'no attributes'}"
            )
        kind = known[name].type
        if kind == _KINDS.FLOAT and isinstance(value, int):
            return float(value)
        if kind == _KINDS.FLOATS:
            return [float(v) for v in value]
        return int(value) if kind == _KINDS.INT and isinstance(value, bool) else value

    def constant_type(
        self, position: int, number: float, types: Sequence[ir.DataType | None]
    ) -> ir.DataType | None:
        """Return the element type for a Python number as an input: that of the inputs it must agree with.

        Args:
            position: position of the number among the inputs.
            number: a Python number.
            types: types of all inputs; ``None`` for numbers and absent inputs.

        Returns:
            The type, or ``None`` where ONNX leaves it open.
        """
        own = self._formal(position)
        for i, dtype in enumerate(types):
            if dtype is not None and self._formal(i).type_str == own.type_str:
                return dtype
        allowed = {_element_type(text) for text in own.types}
        natural = (
            ir.DataType.BOOL
            if isinstance(number, bool)
            else ir.DataType.INT64 if isinstance(number, int) else ir.DataType.FLOAT
        )  # fmt: skip
        return next((t for t in (natural, ir.DataType.FLOAT) if t in allowed), None)

    def _formal(self, position: int) -> Any:
        formals = self._schema.inputs
        return formals[position] if position < len(formals) else formals[-1]


def _element_type(text: str) -> ir.DataType | None:
    name = text.removeprefix("tensor(").removesuffix(")").upper()
    return getattr(ir.DataType, name, None)
