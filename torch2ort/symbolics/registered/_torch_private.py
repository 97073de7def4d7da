"""Every private name of torch that torch2ort.symbolics.registered touches, with the versions tried.

| name | tried on |
| --- | --- |
| torch._ops.OpOverload._schema | 2.13.0 |
"""

from __future__ import annotations

from typing import Any


def output_count(operator: Any) -> int:
    """How many tensors an operator of torch returns."""
    return len(operator._schema.returns)
