"""pytorch-revgrad: the identity, whose gradient is reversed.

Inference returns the value. In training the call stays a PythonOp whose output shares its argument's memory.
"""

from __future__ import annotations

from typing import Any

from torch2ort.pythonop.registry import register_exporter, register_inplace_map

_NAME = "pytorch_revgrad.functional.RevGrad"

register_inplace_map(_NAME, forward={0: 0})


@register_exporter(_NAME)
def _identity(g: Any, x: Any, alpha: Any) -> Any:
    return None if g.training else x
