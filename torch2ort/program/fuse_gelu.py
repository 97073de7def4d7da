"""Fusion of a GELU that a model computes by its formula."""

from __future__ import annotations

import math
from typing import Any

import torch

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


def fuse_gelu(graph_module: torch.fx.GraphModule, *, in_half: bool) -> None:
    """Replace ``0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x**3)))`` by ``aten.gelu(x, approximate="tanh")``.

    Models such as GPT-2 contain the formula, with the factors in any order.

    Args:
        graph_module: changed in place.
        in_half: True to fuse in half precision, too, where eager rounds the result of each of these
            operators.
    """
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not aten.tanh.default:
            continue
        if in_half or node.meta["val"].dtype not in _HALF:
            _fuse(graph, node)


def _fuse(graph: torch.fx.Graph, tanh: torch.fx.Node) -> None:
    x = _argument_of_tanh(tanh)
    user = next(iter(tanh.users)) if len(tanh.users) == 1 else None
    if x is None or user is None or _other(user, aten.add.Tensor, tanh) != 1:
        return
    whole = _product_with_half(user, x)
    if whole is None:
        return
    with graph.inserting_before(whole):
        gelu = graph.call_function(aten.gelu.default, (x,), {"approximate": "tanh"})
    gelu.meta = dict(whole.meta)
    whole.replace_all_uses_with(gelu)


def _argument_of_tanh(tanh: torch.fx.Node) -> torch.fx.Node | None:
    """Return the ``x`` of ``tanh(sqrt(2 / pi) (x + 0.044715 x**3))``, or ``None``."""
    factor, total = _number_and_node(tanh.args[0], aten.mul.Tensor)
    if total is None or not _close(factor, math.sqrt(2 / math.pi)) or total.target is not aten.add.Tensor:
        return None
    if total.kwargs:
        return None
    for x, term in (total.args, total.args[::-1]):
        share, cube = _number_and_node(term, aten.mul.Tensor)
        if cube is None or not _close(share, 0.044715):
            continue
        if cube.target is aten.pow.Tensor_Scalar and cube.args[0] is x and cube.args[1] == 3:
            return x if isinstance(x, torch.fx.Node) else None
    return None


def _product_with_half(sum_: torch.fx.Node, x: torch.fx.Node) -> torch.fx.Node | None:
    """Return the node of ``0.5 * x * sum_``, in any order of the products."""
    if len(sum_.users) != 1:
        return None
    product = next(iter(sum_.users))
    other = _other(product, aten.mul.Tensor, sum_)
    if isinstance(other, torch.fx.Node):
        half, node = _number_and_node(other, aten.mul.Tensor)
        if half == 0.5 and node is x:
            return product
        if other is x and len(product.users) == 1:
            whole = next(iter(product.users))
            return whole if _other(whole, aten.mul.Tensor, product) == 0.5 else None
    elif other == 0.5 and len(product.users) == 1:
        whole = next(iter(product.users))
        return whole if _other(whole, aten.mul.Tensor, product) is x else None
    return None


def _number_and_node(value: Any, target: Any) -> tuple[float | None, torch.fx.Node | None]:
    """Return the two operands of ``value`` if it is a call of ``target`` with a number and a node."""
    if not isinstance(value, torch.fx.Node) or value.target is not target or value.kwargs:
        return None, None
    for number, node in (value.args, value.args[::-1]):
        if isinstance(number, (int, float)) and isinstance(node, torch.fx.Node):
            return number, node
    return None, None


def _other(node: torch.fx.Node, target: Any, one: torch.fx.Node) -> Any:
    """Return the operand of ``node``, a call of ``target``, other than ``one``."""
    if node.target is not target or node.kwargs or len(node.args) != 2:
        return None
    first, second = node.args
    return second if first is one else first


def _close(number: float | None, expected: float) -> bool:
    return number is not None and math.isclose(number, expected, rel_tol=1e-6)
