"""Nodes of a program that compute in half precision, of which onnxruntime-training adds up no gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch2ort.symbolics.sites import is_operator, operator_name

HALF = frozenset({torch.float16, torch.bfloat16})
_CASTS = frozenset({"_to_copy", "to", "convert_element_type", "detach", "clone"})


def floating_dtypes(node: torch.fx.Node) -> set[torch.dtype]:
    """Floating-point types among what ``node`` takes and gives."""
    values: list[object] = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    flat: Iterable[object] = (
        v for value in values for v in (value if isinstance(value, (list, tuple)) else [value])
    )
    return {
        v.dtype
        for v in flat
        if isinstance(v, torch.Tensor) and (v.dtype.is_floating_point or v.dtype.is_complex)
    }


def computes_in_half(node: torch.fx.Node) -> bool:
    """Whether ``node`` computes in half precision, and does not just convert to or from it."""
    if not is_operator(node) or operator_name(node) in _CASTS:
        return False
    return not HALF.isdisjoint(floating_dtypes(node))
