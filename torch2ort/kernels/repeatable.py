"""Kernels of PyTorch's that are cheap enough to run twice, and the ONNX operators that do the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torch2ort.kernels._torch_private import OpOverload
from torch2ort.kernels.functions import PairedKernel, decode_call
from torch2ort.pythonop import Site

aten = torch.ops.aten
_MICROSOFT = "com.microsoft"


@dataclass(frozen=True, slots=True)
class Operator:
    """An ONNX operator of the tensor arguments of a kernel's call, in their order."""

    name: str
    domain: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)


def _gelu(x: Any, approximate: str) -> Operator:
    return Operator("FastGelu" if approximate == "tanh" else "Gelu", _MICROSOFT)


def _silu(x: Any) -> Operator:
    return Operator("QuickGelu", _MICROSOFT, {"alpha": 1.0})


def _layer_norm(
    x: Any, shape: list[int], weight: Any, bias: Any, epsilon: float, *_: object
) -> Operator | None:
    # ONNX has none without a weight.
    if weight is None:
        return None
    return Operator("LayerNormalization", attributes={"axis": -len(shape), "epsilon": float(epsilon)})


# Per element these take a few operations, and their backward keeps what they are computed from.
_OPERATORS: dict[OpOverload, Callable[..., Operator | None]] = {
    aten.gelu.default: _gelu,
    aten.layer_norm.default: _layer_norm,
    aten.silu.default: _silu,
}


def repeatable(site: Site) -> Operator | None:
    """The operator that cheaply computes again what a site's forward returned, or ``None``."""
    if site.function is not PairedKernel or any(t.dtype != torch.float32 for t in site.known_result.inputs):
        return None
    call = decode_call(site.arguments[0])
    operator = _OPERATORS.get(call.operator)
    return None if operator is None else operator(*call.arguments)
