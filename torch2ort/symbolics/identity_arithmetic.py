"""Arithmetic with a number that changes nothing, down to the last bit: ``x * 1``, ``x - 0``.

IEEE 754 has two zeros. ``x + 0.0`` makes 0.0 of -0.0, so that only ``x + -0.0`` and ``x - 0.0`` are ``x``.
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import RewriteRuleClassBase


class _NeutralNumber(RewriteRuleClassBase):
    """Replaces a node by ``Identity`` where its second input is a number that leaves the first as it is."""

    def __init__(self, op_type: str, neutral: float) -> None:
        super().__init__(f"Neutral{op_type}")
        self._op_type, self._neutral = op_type, neutral

    def pattern(self, op: Any, x: Any, number: Any) -> Any:
        """Any node of the operator."""
        return getattr(op, self._op_type)(x, number)

    def check(self, context: Any, x: ir.Value, number: ir.Value) -> bool:  # type: ignore[override]
        """Whether the second input is the neutral number, and has no dimensions that the result would get."""
        tensor = ir.convenience.get_const_tensor(number)
        if tensor is None or tensor.shape.rank() != 0:
            return False
        found = tensor.numpy().item()
        if found != self._neutral:
            return False
        # Integers have one zero.
        return isinstance(found, int) or math.copysign(1, found) == math.copysign(1, self._neutral)

    def rewrite(self, op: Any, x: ir.Value, number: ir.Value) -> Any:
        """The first input, as a result of its own."""
        return op.Identity(x)


NEUTRAL_NUMBER_RULES = {
    op_type: _NeutralNumber.rule(op_type, neutral)
    for op_type, neutral in (("Mul", 1), ("Div", 1), ("Sub", 0.0), ("Add", -0.0))
}
