"""Sizes of a program as symbols of a new trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch2ort._torch import aot as private
from torch2ort.errors import UnsupportedOperatorError
from torch2ort.sizes import expressions
from torch2ort.sizes.symbols import expression_of, has_hint, size_hint


def renew_sizes(graph: torch.fx.Graph) -> None:
    """Replace the values of nodes by fake tensors of a new trace, with the same sizes in the sample.

    Args:
        graph: nodes of a program; conditions on their sizes are those of the new trace from then on.

    Raises:
        UnsupportedOperatorError: a size depends on values, or a tensor has no strides.
    """
    found: dict[str, torch.SymInt] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        shape: Sequence[Any] = value.shape if isinstance(value, torch.Tensor) else ()
        for size in shape:
            if not isinstance(size, int) and expression_of(size).is_Symbol:
                found.setdefault(str(expression_of(size)), size)
    mode, made = private.symbolic_sizes([size_hint(size) for size in found.values()])
    symbols = dict(zip(found, made, strict=True))

    def renewed(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [renewed(item) for item in value]
        if isinstance(value, torch.SymInt):
            return _evaluated(value, symbols)
        if isinstance(value, (torch.SymBool, torch.SymFloat)):
            return value.node.hint
        if not isinstance(value, torch.Tensor):
            return value
        if value.layout is not torch.strided:
            raise UnsupportedOperatorError(f"a tensor has the layout {value.layout}")
        sizes = [renewed(size) for size in value.shape]
        strides = [renewed(stride) for stride in value.stride()]
        tensor = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
        return tensor.requires_grad_(value.requires_grad and value.is_leaf)

    with mode:
        for node in graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = renewed(node.meta["val"])


def _evaluated(size: torch.SymInt, symbols: dict[str, Any]) -> Any:
    expression = expression_of(size)
    if expression.is_Integer:
        return int(expression)
    try:
        return expressions.evaluate(expressions.plain(expression, {}), symbols)
    except (KeyError, ValueError):
        kind = "is no size of an input" if has_hint(size) else "depends on values"
        raise UnsupportedOperatorError(f"the size {size} {kind}") from None
