"""Boolean masks whose number of selected elements is known only in a run.

``logits[mask]`` and ``labels[mask]`` have equal numbers of rows, but PyTorch's trace gives each selection an
unknown size of its own. Here each mask is counted once, so all tensors that it selects have one size.
"""

from __future__ import annotations

from typing import Any

import torch

from torch2ort._torch import aot as private
from torch2ort.differentiate.assigned_buffers import to_memory
from torch2ort.differentiate.symbolic_shapes import same_sizes
from torch2ort.program.alias_analysis import written_by
from torch2ort.program.kernel_sites import is_random

aten = torch.ops.aten
_INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)


def share_positions(graph: torch.fx.Graph) -> None:
    """Replace masks by the positions of the elements that they select.

    Args:
        graph: nodes of a program, not yet functional, with its regions without gradient inlined; changed in
            place.
    """
    masks = _Masks(graph)
    for node in list(graph.nodes):
        # In the order of the graph, so the positions are computed before their first use.
        if node.target in _INDEXED:
            given: list[Any] = []
            for index in node.args[1]:
                given += masks.positions(index, node) if _is_mask(index) else [index]
            node.args = (node.args[0], given, *node.args[2:])
        elif node.target is aten.masked_select.default and same_sizes(*(n.meta["val"] for n in node.args)):
            tensor, mask = node.args
            node.target, node.args = aten.index.Tensor, (tensor, masks.positions(mask, node))


class _Masks:
    """The positions of the elements that each mask selects."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._graph = graph
        self._written = {_memory(target) for node in graph.nodes for target in written_by(node)}
        self._values: dict[torch.fx.Node, str] = {}
        self._known: dict[str, list[torch.fx.Node]] = {}

    def positions(self, mask: torch.fx.Node, user: torch.fx.Node) -> list[torch.fx.Node]:
        """Return one node per dimension of a mask that ``user`` reads."""
        value = self._value(mask)
        if value in self._known:
            return self._known[value]
        with self._graph.inserting_before(user):
            found = self._graph.call_function(aten.nonzero.default, (mask,))
            dims = range(mask.meta["val"].dim())
            places = [self._graph.call_function(aten.select.int, (found, 1, axis)) for axis in dims]
        for node in (found, *places):
            node.meta = {"stack_trace": user.stack_trace}
        if _memory(mask) not in self._written:
            self._known[value] = places
        return places

    def _value(self, node: torch.fx.Node) -> str:
        """Return a text that is equal for nodes that compute equal values from equal operands."""
        if node not in self._values:
            self._values[node] = self._compute_value(node)
        return self._values[node]

    def _compute_value(self, node: torch.fx.Node) -> str:
        known = isinstance(node.target, private.OpOverload) and node.target.namespace == "aten"
        read = (node, *node.all_input_nodes)
        if not known or is_random(node) or any(_memory(n) in self._written for n in read):
            return node.name
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: _Text(self._value(n)))
        return f"{node.target}{args}{kwargs}"


class _Text(str):
    """A text whose representation has no quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.fx.Node) and index.meta["val"].dtype == torch.bool


def _memory(node: torch.fx.Node) -> torch.fx.Node:
    return list(to_memory(node))[-1]
