"""Translation of 3-d convolutions."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch

from torch2ort.symbolics.graph_builder import constant, op
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
    """Omit an absent bias, for which torch.onnx adds one of a wrong rank; accept a single volume, too."""
    strides, pads, dilations = (list(given) * (3 // len(given)) for given in (stride, padding, dilation))
    is_one = input.shape is not None and len(input.shape) == 4
    volumes = op("Unsqueeze", input, constant([0])) if is_one else input
    result = op(
        "Conv",
        volumes,
        weight,
        bias,
        strides=strides,
        pads=[*pads, *pads],
        dilations=dilations,
        group=groups,
    )
    return op("Squeeze", result, constant([0])) if is_one else result
