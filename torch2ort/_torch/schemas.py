"""Every private name of torch that torch2ort.symbolics.registered touches, with the versions tried.

| name | tried on |
| --- | --- |
| torch._ops.OpOverload._schema | 2.11-2.15.0 |
"""

from __future__ import annotations

from typing import Any

from torch2ort.support.versions import need, private_names

with private_names("torch"):
    from torch._ops import OpOverload

    need(OpOverload, "_schema")


def output_count(operator: Any) -> int:
    """How many tensors an operator of torch returns."""
    return len(operator._schema.returns)
