"""Activations that ONNX Runtime has a kernel and a gradient for."""

from __future__ import annotations

import onnx_ir as ir
import torch

from torch2ort.symbolics.graph_builder import op
from torch2ort.symbolics.translations.registry import translates

aten = torch.ops.aten


@translates(aten.gelu.default)
def gelu(self: ir.Value, approximate: str = "none") -> ir.Value:
    """By ONNX Runtime's own operators, at every opset."""
    return op("com.microsoft::FastGelu" if approximate == "tanh" else "com.microsoft::Gelu", self)
