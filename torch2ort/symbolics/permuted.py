"""Tensors whose dimensions are in another order: in PyTorch a view, in ONNX a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from torch2ort.symbolics import _torch_private as private

aten = torch.ops.aten
_SAME = frozenset({aten.alias.default, aten.detach.default})
_SHAPED = frozenset({aten._unsafe_view.default, aten.expand.default, aten.reshape.default, aten.view.default})


def unpermuted(node: torch.fx.Node) -> tuple[torch.fx.Node, list[int] | None]:
    """What ``node`` is a permutation of, and the order of its dimensions; ``None`` if it is none."""
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
    """The order in which ``node`` takes the dimensions of its argument; ``None`` if it permutes nothing."""
    permutes = _ORDERS.get(node.target)
    return None if permutes is None else permutes(node, node.meta["val"].dim())


def inverse(order: Sequence[int]) -> list[int]:
    """The order that undoes ``order``."""
    return [list(order).index(axis) for axis in range(len(order))]


def _changes_nothing(node: torch.fx.Node) -> bool:
    """Whether ``node`` gives its argument as it is."""
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
