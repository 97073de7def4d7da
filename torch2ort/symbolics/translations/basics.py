"""Operators that move, copy or stop."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch

from torch2ort.symbolics.graph_builder import op
from torch2ort.symbolics.stop_gradient import STOP_GRADIENT
from torch2ort.symbolics.translations.registry import translates

aten = torch.ops.aten


@translates(aten.detach.default)
def detach(self: ir.Value) -> ir.Value:
    """The same values, through which no gradient goes."""
    if self.dtype is None or not self.dtype.is_floating_point():
        return op("Identity", self)
    return op(STOP_GRADIENT, self)


@translates(aten.permute.default)
def permute(self: ir.Value, dims: Sequence[int]) -> ir.Value:
    """Dimensions in another order."""
    rank = len(dims)
    return op("Transpose", self, perm=[d % rank for d in dims])


@translates(aten.clamp.default)
def clamp(self: ir.Value, min: float | None = None, max: float | None = None) -> ir.Value:
    """By Clip, whose gradient at the bounds is PyTorch's (that of Min and Max is halved there)."""
    return op("Clip", self, min, max)


@translates(aten.clamp_min.default)
def clamp_min(self: ir.Value, min: float) -> ir.Value:
    """See :func:`clamp`."""
    return op("Clip", self, min)


@translates(aten.clamp_max.default)
def clamp_max(self: ir.Value, max: float) -> ir.Value:
    """See :func:`clamp`."""
    return op("Clip", self, None, max)


@translates(aten.sym_numel.default)
def sym_numel(self: ir.Value) -> ir.Value:
    """The number of elements."""
    return op("Size", self)
