"""The nodes that a program's nodes are computed from, and those that are computed from them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch


def dependent_on(graph: torch.fx.Graph, nodes: Iterable[torch.fx.Node]) -> set[torch.fx.Node]:
    """Return ``nodes``, such as the gradients of outputs, and all nodes that are computed from them."""
    found = set(nodes)
    for node in graph.nodes:
        if node.op == "call_function" and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def ancestors(nodes: Iterable[torch.fx.Node], stop: Collection[torch.fx.Node] = ()) -> set[torch.fx.Node]:
    """Return ``nodes`` and all nodes that they are computed from, up to those of ``stop``."""
    found: set[torch.fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            if node not in stop:
                stack.extend(node.all_input_nodes)
    return found
