"""Regions under ``torch.no_grad()``: inlined, with a stop-gradient on what leaves them."""

from __future__ import annotations

import operator
import typing

import torch

from torch2ort.errors import UnsupportedOperatorError
from torch2ort.symbolics.source import source_line

_WRAPPED = torch.ops.higher_order.wrap_with_set_grad_enabled
_DETACH = torch.ops.aten.detach.default


def inline_grad_regions(graph_module: torch.fx.GraphModule) -> None:
    """Replace each ``wrap_with_set_grad_enabled`` of ``graph_module`` by the nodes of its region.

    Decomposition would inline them too, and forget that no gradient passes through.

    Raises:
        UnsupportedOperatorError: a region writes in place into a tensor that requires a gradient.
    """
    for node in list(graph_module.graph.nodes):
        if node.op == "call_function" and node.target is _WRAPPED:
            _inline(graph_module, node)
    graph_module.recompile()


def _inline(graph_module: torch.fx.GraphModule, call: torch.fx.Node) -> None:
    enabled, region, *arguments = call.args
    assert isinstance(region, torch.fx.Node)
    body = graph_module.get_submodule(str(region.target))
    assert isinstance(body, torch.fx.GraphModule)
    inline_grad_regions(body)
    graph = graph_module.graph
    values: dict[torch.fx.Node, torch.fx.Node] = {}
    supply = iter(arguments)
    results: list[torch.fx.Node] = []
    with graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(supply)  # type: ignore[assignment]
            elif node.op == "output":
                results = [values[n] if isinstance(n, torch.fx.Node) else n for n in _flat(node.args[0])]
            else:
                if not enabled:
                    _refuse_write(node)
                values[node] = graph.node_copy(node, lambda n: values[n])
        if not enabled:
            results = [_stop(graph, r) for r in results]
    for user in list(call.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(results[typing.cast(int, user.args[1])])
        graph.erase_node(user)
    graph.erase_node(call)
    if not region.users:
        graph.erase_node(region)


def _flat(value: object) -> tuple[torch.fx.Node, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)  # type: ignore[return-value]


def _stop(graph: torch.fx.Graph, value: torch.fx.Node) -> torch.fx.Node:
    if not isinstance(value, torch.fx.Node) or not isinstance(value.meta.get("val"), torch.Tensor):
        return value
    stopped = graph.call_function(_DETACH, (value,))
    stopped.meta = dict(value.meta)
    return stopped


def _refuse_write(node: torch.fx.Node) -> None:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for argument, value in zip(schema.arguments, node.args, strict=False):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if (
            written
            and isinstance(value, torch.fx.Node)
            and getattr(value.meta.get("val"), "requires_grad", False)
        ):
            raise UnsupportedOperatorError(
                f"{node.target} at {source_line(node)} writes into a tensor that requires a gradient, "
                f"inside torch.no_grad(); autograd does not see that write, and a graph cannot hide it. "
                f"Compute a new tensor, or detach the tensor before writing into it"
            )
