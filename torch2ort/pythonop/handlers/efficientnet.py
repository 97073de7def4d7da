"""efficientnet_pytorch: a Swish that saves memory in eager PyTorch, with the exact gradient."""

from __future__ import annotations

from typing import Any

from torch2ort.pythonop.registry import register_exporter


@register_exporter("efficientnet_pytorch.utils.SwishImplementation")
def _swish(g: Any, x: Any) -> Any:
    return g.op("Mul", x, g.op("Sigmoid", x))
