"""Translation of losses that ONNX has an operator for."""

from __future__ import annotations

import onnx_ir as ir

from torch2ort.program import internal_ops
from torch2ort.symbolics.graph_builder import ops
from torch2ort.symbolics.translations.registry import translates

_REDUCTIONS = ("none", "mean", "sum")


@translates(internal_ops.cross_entropy)
def cross_entropy(
    input: ir.Value, target: ir.Value, weight: ir.Value | None, reduction: int, ignore_index: int
) -> ir.Value:
    """Add the second output, too: the log probabilities, which the gradient is computed from."""
    return ops(
        "SoftmaxCrossEntropyLoss",
        input,
        target,
        weight,
        dtypes=(input.dtype, input.dtype),
        reduction=_REDUCTIONS[reduction],
        ignore_index=ignore_index,
    )[0]
