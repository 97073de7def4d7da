"""Sums of products with one tensor as one product with the sum of the weights."""

from __future__ import annotations

from typing import Any

import torch

from torch2ort.program.fx_insert import insert_call
from torch2ort.program.sparsity.nodes import args_of, argument, name_of, shape_of
from torch2ort.program.sparsity.row_axes import same

aten = torch.ops.aten


def merge_products(graph: torch.fx.Graph) -> None:
    """Replace ``linear(x, a) + linear(x, b)`` by ``linear(x, a + b)``, which is equal besides rounding.

    Three products with all rows, one of forward and two of backward, become a sum of weights. Both products
    are unused elsewhere, and their weights have one shape and dtype.

    Args:
        graph: a program's nodes; changed in place.
    """
    for node in list(graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
            continue
        one, other = node.args
        if not _is_product(one) or not _is_product(other) or one is other:
            continue
        x, first, *_ = args_of(one)
        if args_of(other)[0] is not x or not _are_alike(first, args_of(other)[1]):
            continue
        weight = insert_call(node, aten.add.Tensor, first, args_of(other)[1])
        biases = [b for b in (argument(one, "bias"), argument(other, "bias")) if b is not None]
        bias = insert_call(node, aten.add.Tensor, *biases) if len(biases) == 2 else next(iter(biases), None)
        node.replace_all_uses_with(insert_call(node, aten.linear.default, x, weight, bias))
        for erased in (node, one, other):
            graph.erase_node(erased)


def _is_product(node: Any) -> bool:
    return isinstance(node, torch.fx.Node) and name_of(node) == "linear" and len(node.users) == 1


def _are_alike(one: torch.fx.Node, other: torch.fx.Node) -> bool:
    """Return True if two weights have the same sizes and dtype."""
    is_type = one.meta["val"].dtype == other.meta["val"].dtype
    return is_type and all(map(same, shape_of(one), shape_of(other)))
