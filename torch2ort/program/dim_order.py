"""Orders of dimensions: a permuted tensor is a view in PyTorch, and a copy in ONNX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from torch2ort._torch import fake_tensors as private
from torch2ort.sizes.symbols import has_hint, size_hint
from torch2ort.support.provenance import origin_of

aten = torch.ops.aten
_SAME = frozenset({aten.alias.default, aten.detach.default})
_SHAPED = frozenset({aten._unsafe_view.default, aten.expand.default, aten.reshape.default, aten.view.default})


def unpermuted(node: torch.fx.Node) -> tuple[torch.fx.Node, list[int] | None]:
    """Return the node that ``node`` permutes, and the order of its dimensions; ``None`` if there is none."""
    rank = node.meta["val"].dim()
    order: list[int] | None = None
    found = node, order
    while node.target in _ORDERS or _changes_nothing(node):
        if node.target in _ORDERS:
            outer = list(range(rank)) if order is None else order
            inner = _ORDERS[node.target](node, rank)
            order = [inner[axis] for axis in outer]
        node = node.all_input_nodes[0]
        if order is not None:
            found = node, order
    return found


def order_of(node: torch.fx.Node) -> list[int] | None:
    """Return the order of the argument's dimensions in ``node``; ``None`` if it permutes nothing."""
    permutes = _ORDERS.get(node.target)
    return None if permutes is None else permutes(node, node.meta["val"].dim())


def permuted(node: torch.fx.Node, order: Sequence[int]) -> torch.fx.Node:
    """Permute ``node``, by a new node at the place where its graph inserts."""
    made = node.graph.call_function(aten.permute.default, (node, list(order)))
    made.meta = {**origin_of(node), "val": node.meta["val"].permute(*order)}
    return made


def inverse(order: Sequence[int]) -> list[int]:
    """Return the order that undoes ``order``."""
    return [list(order).index(axis) for axis in range(len(order))]


def order_of_memory(value: torch.Tensor) -> list[int] | None:
    """Return the dimensions of a tensor from the outermost in memory to the innermost.

    The comparisons do not fix a size that varies.

    Args:
        value: a tensor of a trace.

    Returns:
        ``None`` for a tensor with gaps or shared elements, or with unknown strides.
    """
    if value.layout is not torch.strided or not all(map(has_hint, (*value.shape, *value.stride()))):
        return None
    strides, axes = value.stride(), list(range(value.dim()))
    if all(isinstance(size, int) for size in value.shape) and value.is_contiguous():
        return axes
    order = sorted(axes, key=lambda axis: size_hint(strides[axis]), reverse=True)
    expected: int | torch.SymInt = 1
    for axis in reversed(order):
        size = value.shape[axis]
        is_one = isinstance(size, int) and size == 1
        if not is_one and str(strides[axis]) != str(expected):
            return None
        expected = expected * size
    return order


def _changes_nothing(node: torch.fx.Node) -> bool:
    """Return True if ``node`` returns its argument unchanged."""
    if node.target in _SAME:
        return True
    if node.target not in _SHAPED:
        return False
    given, made = node.all_input_nodes[0].meta["val"].shape, node.meta["val"].shape
    return len(given) == len(made) and all(private.is_known(a == b) for a, b in zip(given, made, strict=True))


def _transposed(node: torch.fx.Node, rank: int) -> list[int]:
    order = list(range(rank))
    if rank:
        first, second = (cast(int, axis) % rank for axis in node.args[1:3])
        order[first], order[second] = order[second], order[first]
    return order


_ORDERS: dict[Any, Callable[[Any, int], list[int]]] = {
    aten.t.default: lambda node, rank: list(range(rank))[::-1],
    aten.transpose.int: _transposed,
    aten.permute.default: lambda node, rank: [axis % rank for axis in node.args[1]],
}
