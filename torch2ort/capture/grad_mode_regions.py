"""Regions of a program that run with gradients switched on or off."""

from __future__ import annotations

import operator
from typing import Any

import torch


class GradModeRegions:
    """The nodes of a program and of its regions, each of which has a graph of its own.

    Attributes:
        nodes: the nodes of the program and of its regions.
    """

    def __init__(self, module: torch.fx.GraphModule) -> None:
        self.nodes: list[torch.fx.Node] = []
        self._same: dict[torch.fx.Node, torch.fx.Node] = {}
        self._unrecorded: set[torch.fx.Node] = set()
        self._add(module, recorded=True)

    def outside(self, node: Any) -> Any:
        """Return the node outside for a region's argument, or inside for its result; otherwise ``node``."""
        while isinstance(node, torch.fx.Node) and node in self._same:
            node = self._same[node]
        return node

    def records(self, node: torch.fx.Node) -> bool:
        """Return True if autograd records ``node``."""
        return node not in self._unrecorded

    def _add(self, module: torch.fx.GraphModule, *, recorded: bool) -> None:
        for node in module.graph.nodes:
            self.nodes.append(node)
            if not recorded:
                self._unrecorded.add(node)
            if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
                self._enter(module, node)

    def _enter(self, module: torch.fx.GraphModule, call: torch.fx.Node) -> None:
        enabled, region, *given = call.args
        assert isinstance(region, torch.fx.Node)
        inner = module.get_submodule(str(region.target))
        assert isinstance(inner, torch.fx.GraphModule)
        self._add(inner, recorded=bool(enabled))
        placeholders = [node for node in inner.graph.nodes if node.op == "placeholder"]
        if any(node in self._same for node in placeholders):
            return  # A region that runs twice got other tensors the first time.
        self._same.update(zip(placeholders, given, strict=True))  # type: ignore[arg-type]
        (last,) = (node for node in inner.graph.nodes if node.op == "output")
        results = last.args[0]
        for user in call.users:
            if user.target is operator.getitem and isinstance(results[user.args[1]], torch.fx.Node):
                self._same[user] = results[user.args[1]]
