"""Convolutions."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch

from torch2ort.symbolics.graph_builder import op
from torch2ort.symbolics.translations.registry import translates


@translates(torch.ops.aten.conv3d.default)
def conv3d(
    input: ir.Value,
    weight: ir.Value,
    bias: ir.Value | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> ir.Value:
    """Without a bias if it has none: torch.onnx makes one of another rank, which ONNX Runtime refuses."""
    strides, pads, dilations = (list(given) * (3 // len(given)) for given in (stride, padding, dilation))
    return op(
        "Conv", input, weight, bias, strides=strides, pads=[*pads, *pads], dilations=dilations, group=groups
    )
