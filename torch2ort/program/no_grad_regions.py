"""Inlining of regions under ``torch.no_grad()``, with the values that they read detached."""

from __future__ import annotations

import torch

from torch2ort.program.alias_analysis import tensor_itself
from torch2ort.program.fx_insert import replace_call
from torch2ort.program.noop_ops import argument_itself

_WRAPPED = torch.ops.higher_order.wrap_with_set_grad_enabled
_DETACH = torch.ops.aten.detach.default
_ENABLED = "torch2ort_grad_enabled"  # in the meta of a region's node: the grad mode of the innermost region


def inline_grad_regions(graph_module: torch.fx.GraphModule) -> None:
    """Replace each ``wrap_with_set_grad_enabled`` of ``graph_module`` by the nodes of its region.

    Decomposition would inline them too, but let gradients pass through.
    """
    _note_readers(graph_module.graph)
    for node in list(graph_module.graph.nodes):
        if node.op == "call_function" and node.target is _WRAPPED:
            _inline(graph_module, node)


def _note_readers(graph: torch.fx.Graph) -> None:
    """Add to each node the users that torch forgets when it cuts a program into regions.

    It forgets users whose own results are unused. They may raise an error all the same.
    """
    for node in graph.nodes:
        for read in node.all_input_nodes:
            read.users.setdefault(node)


def _inline(graph_module: torch.fx.GraphModule, call: torch.fx.Node) -> None:
    enabled, region, *arguments = call.args
    assert isinstance(region, torch.fx.Node)
    body = graph_module.get_submodule(str(region.target))
    assert isinstance(body, torch.fx.GraphModule)
    inline_grad_regions(body)
    graph = graph_module.graph
    supply = iter(arguments)
    # A region without gradient reads detached values; a region with gradient inside of it reads them as they
    # are.
    given: dict[torch.fx.Node, torch.fx.Node] = {}
    read: dict[torch.fx.Node, torch.fx.Node] = {}
    results: list[torch.fx.Node] = []
    with graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "placeholder":
                given[node] = read[node] = next(supply)  # type: ignore[assignment]
                if not enabled:
                    read[node] = _stop(graph, given[node])
            elif node.op == "output":
                results = [_result(n, given, read) for n in _flat(node.args[0])]
            else:
                node.meta.setdefault(_ENABLED, enabled)
                values = given if node.meta[_ENABLED] else read
                given[node] = read[node] = graph.node_copy(node, values.__getitem__)
    replace_call(call, results)
    if not region.users:
        graph.erase_node(region)


def _result(
    value: object, given: dict[torch.fx.Node, torch.fx.Node], read: dict[torch.fx.Node, torch.fx.Node]
) -> torch.fx.Node:
    """Return a region's result; for a tensor that it wrote into or returned, the tensor from outside."""
    if not isinstance(value, torch.fx.Node):
        return value  # type: ignore[return-value]
    own = tensor_itself(value)
    while (argument := argument_itself(own)) is not None:
        own = tensor_itself(argument)
    return given[own] if own.op == "placeholder" else read[value]


def _flat(value: object) -> tuple[torch.fx.Node, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)  # type: ignore[return-value]


def _stop(graph: torch.fx.Graph, value: torch.fx.Node) -> torch.fx.Node:
    if not isinstance(value, torch.fx.Node) or not isinstance(value.meta.get("val"), torch.Tensor):
        return value
    stopped = graph.call_function(_DETACH, (value,))
    stopped.meta = dict(value.meta)
    return stopped
