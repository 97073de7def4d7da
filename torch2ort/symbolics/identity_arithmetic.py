"""Nodes that change nothing, down to the last bit: ``x * 1``, ``x - 0``, ``x.view(x.shape)``.

IEEE 754 has two zeros. ``x + 0.0`` makes 0.0 of -0.0, so that only ``x + -0.0`` and ``x - 0.0`` are ``x``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import RewriteRuleClassBase


class _NeutralNumber(RewriteRuleClassBase):
    """Replaces a node by ``Identity`` where its second input has numbers that leave the first as it is."""

    def __init__(self, op_type: str, neutral: float) -> None:
        super().__init__(f"Neutral{op_type}")
        self._op_type, self._neutral = op_type, neutral

    def pattern(self, op: Any, x: Any, number: Any) -> Any:
        """Any node of the operator."""
        return getattr(op, self._op_type)(x, number)

    def check(self, context: Any, x: ir.Value, number: ir.Value) -> bool:  # type: ignore[override]
        """Whether the second input is the neutral number everywhere, and gives the result no dimensions."""
        tensor = ir.convenience.get_const_tensor(number)
        if tensor is None or not _fits(tensor.shape, x.shape):
            return False
        found = tensor.numpy()
        if not found.size or not (found == self._neutral).all():
            return False
        # Integers have one zero.
        if self._neutral or found.dtype.kind in "iub":
            return True
        is_negative = math.copysign(1, self._neutral) < 0
        return bool((np.signbit(found.astype(np.float64)) == is_negative).all())

    def rewrite(self, op: Any, x: ir.Value, number: ir.Value) -> Any:
        """The first input, as a result of its own."""
        return op.Identity(x)


class _OwnShape(RewriteRuleClassBase):
    """Replaces a reshape to the shape that a value has by ``Identity``."""

    def pattern(self, op: Any, x: Any, shape: Any) -> Any:
        """Any reshape."""
        return op.Reshape(x, shape, _outputs=["reshaped"])

    def check(self, context: Any, x: ir.Value, shape: ir.Value, reshaped: ir.Value) -> bool:  # type: ignore[override]
        """Whether each size is known, or has the same name."""
        before, after = x.shape, reshaped.shape
        if before is None or after is None or len(before) != len(after):
            return False
        known = [isinstance(size, int) or size.value is not None for size in before]
        return all(known) and all(one == other for one, other in zip(before, after, strict=True))

    def rewrite(self, op: Any, x: ir.Value, shape: ir.Value, reshaped: ir.Value) -> Any:
        """The input, as a result of its own."""
        return op.Identity(x)


def _fits(sizes: ir.ShapeProtocol, of: ir.Shape | None) -> bool:
    """Whether a tensor of these sizes broadcasts to ``of`` as it is."""
    if not len(sizes):
        return True
    if of is None or len(sizes) > len(of):
        return False
    return all(size in (1, other) for size, other in zip(reversed(sizes), reversed(of), strict=False))


OWN_SHAPE_RULE = _OwnShape.rule("OwnShape")
NEUTRAL_NUMBER_RULES = {
    op_type: _NeutralNumber.rule(op_type, neutral)
    for op_type, neutral in (("Mul", 1), ("Div", 1), ("Sub", 0.0), ("Add", -0.0))
}
