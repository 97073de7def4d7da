"""Rewrite rules for nodes that change nothing, not a bit: ``x * 1``, ``x - 0``, ``x.view(x.shape)``.

IEEE 754 has two zeros. ``x + 0.0`` turns -0.0 into 0.0, so only ``x + -0.0`` and ``x - 0.0`` equal ``x``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import RewriteRuleClassBase


class _NeutralNumber(RewriteRuleClassBase):
    """Rule that replaces a node by ``Identity`` if its second input contains only the neutral number."""

    def __init__(self, op_type: str, neutral: float) -> None:
        super().__init__(f"Neutral{op_type}")
        self._op_type, self._neutral = op_type, neutral

    def pattern(self, op: Any, x: Any, number: Any) -> Any:
        """Match any node of the operator."""
        return getattr(op, self._op_type)(x, number)

    def check(self, context: Any, x: ir.Value, number: ir.Value) -> bool:  # type: ignore[override]
        """Return True if all elements of ``number`` are neutral and it adds no dimensions to the result."""
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
        """Return an ``Identity`` of the first input."""
        return op.Identity(x)


class _OwnShape(RewriteRuleClassBase):
    """Rule that replaces a reshape of a value to its own shape by ``Identity``."""

    def pattern(self, op: Any, x: Any, shape: Any) -> Any:
        """Match any reshape."""
        return op.Reshape(x, shape, _outputs=["reshaped"])

    def check(self, context: Any, x: ir.Value, shape: ir.Value, reshaped: ir.Value) -> bool:  # type: ignore[override]
        """Return True if each size is known and equals that of the result, or has the same name."""
        before, after = x.shape, reshaped.shape
        if before is None or after is None or len(before) != len(after):
            return False
        known = [isinstance(size, int) or size.value is not None for size in before]
        return all(known) and all(one == other for one, other in zip(before, after, strict=True))

    def rewrite(self, op: Any, x: ir.Value, shape: ir.Value, reshaped: ir.Value) -> Any:
        """Return an ``Identity`` of the input."""
        return op.Identity(x)


def _fits(sizes: ir.ShapeProtocol, of: ir.Shape | None) -> bool:
    """Return True if broadcasting a tensor of these sizes to ``of`` leaves the shape ``of``."""
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
