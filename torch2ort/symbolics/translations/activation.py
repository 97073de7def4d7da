"""Activations that ONNX Runtime has a kernel and a gradient for."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch

from torch2ort.symbolics.graph_builder import constant, op
from torch2ort.symbolics.translations.registry import translates

aten = torch.ops.aten


@translates(aten.erf.default)
def erf(self: ir.Value) -> ir.Value:
    """Of what is no number, which ONNX Runtime takes for infinity, what is no number."""
    return op("Where", op("IsNaN", self), self, op("Erf", self))


@translates(aten.erfc.default)
def erfc(self: ir.Value) -> ir.Value:
    """What is missing to one."""
    return op("Sub", constant(np.array(1, self.dtype.numpy())), erf(self))  # type: ignore[union-attr]


@translates(aten.gelu.default)
def gelu(self: ir.Value, approximate: str = "none") -> ir.Value:
    """By ONNX Runtime's own operators, at every opset."""
    return op("com.microsoft::FastGelu" if approximate == "tanh" else "com.microsoft::Gelu", self)
