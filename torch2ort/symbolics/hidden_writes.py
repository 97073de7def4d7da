"""Writes in place that a graph cannot do: what autograd does not see, or what a Function holds.

Under ``torch.no_grad()`` or through a detached tensor, eager PyTorch gives the written tensor its new values
and leaves its gradient as it was. In a graph the new values would come with their own gradient, which is
none. What a Function holds for its backward is the very memory that is written to; in a graph a write makes
a new tensor, and the Function would read the old one.
"""

from __future__ import annotations

import operator

import torch

from torch2ort.errors import UnsupportedOperatorError
from torch2ort.pythonop import Site, site_by_key
from torch2ort.symbolics.gradients import is_float, makes_constants
from torch2ort.symbolics.shared_memory import shared_with, written_by
from torch2ort.symbolics.source import source_line

aten = torch.ops.aten
_PYTHON_OP = torch.ops.torch2ort.python_op.default
_DETACH = frozenset({aten.detach.default, aten.detach_.default})


def refuse_hidden_writes(graph: torch.fx.Graph) -> None:
    """Refuse a write that autograd does not see, into a tensor that carries a gradient and is read later.

    So is a write to what an earlier call of a Function holds for its backward.

    Args:
        graph: a program's nodes, not yet functional; what a region without gradient reads is detached.

    Raises:
        UnsupportedOperatorError: there is one; names its line.
    """
    memory = _Memory()
    nodes = list(graph.nodes)
    for position, node in enumerate(nodes):
        for target in written_by(node):
            base = memory.base(target)
            holder = memory.held.get(base)
            if holder is not None and not _is_of(holder, node):
                raise UnsupportedOperatorError(
                    f"{node.target} at {source_line(node)} writes into a tensor that "
                    f"{_site(holder).func_name} holds for its backward. Eager PyTorch refuses the backward, "
                    f"or reads what was written, and a graph cannot. Write into a clone of it"
                )
            if (
                target in memory.hidden
                and base in memory.tracked
                and _read_later(memory, base, nodes[position + 1 :])
            ):
                raise UnsupportedOperatorError(
                    f"{node.target} at {source_line(node)} writes into a tensor that requires a gradient, "
                    f"where autograd does not see it: inside torch.no_grad() or through a detached tensor. "
                    f"Eager PyTorch keeps the gradient of what was there before, and a graph cannot. Compute "
                    f"a new tensor instead of writing into that one"
                )
        memory.add(node)


class _Memory:
    """Which nodes share memory, and which memory carries a gradient.

    Attributes:
        tracked: the first node of each memory that carries a gradient.
        hidden: nodes that share a memory and do not carry its gradient.
        held: the first node of each memory that a Function holds for its backward -> the Function's call.
    """

    def __init__(self) -> None:
        self._bases: dict[torch.fx.Node, torch.fx.Node] = {}
        self.tracked: set[torch.fx.Node] = set()
        self.hidden: set[torch.fx.Node] = set()
        self.held: dict[torch.fx.Node, torch.fx.Node] = {}

    def base(self, node: torch.fx.Node) -> torch.fx.Node:
        return self._bases.get(node, node)

    def carries(self, node: torch.fx.Node) -> bool:
        return self.base(node) in self.tracked and node not in self.hidden

    def add(self, node: torch.fx.Node) -> None:
        """Note what ``node`` shares, and whether its result or what it writes carries a gradient."""
        value = node.meta.get("val")
        if node.op == "placeholder":
            if isinstance(value, torch.Tensor) and value.requires_grad:
                self.tracked.add(node)
            return
        if node.op != "call_function":
            return
        source = shared_with(node)
        if source is not None:
            self._bases[node] = self.base(source)
            if source in self.hidden or node.target in _DETACH:
                self.hidden.add(node)
        self._add_held(node)
        if makes_constants(node.target):
            return
        if is_float(value) and any(self.carries(n) for n in node.all_input_nodes):
            written = list(written_by(node))
            self.tracked.update(self.base(n) for n in written if n not in self.hidden)
            if source is None and not written:
                self.tracked.add(node)

    def _add_held(self, node: torch.fx.Node) -> None:
        """Note what a call of a Function holds, if a run of it has shown that."""
        call = node.args[0] if node.target is operator.getitem else node
        if not isinstance(call, torch.fx.Node) or call.target is not _PYTHON_OP:
            return
        site = _site(call)
        known = site.known_result
        if not known.observed or not any(site.needs_input_grad):
            return
        if call is not node:
            if node.args[1] in (known.kept_results or ()):
                self.held[self.base(node)] = call
            return
        for tensor, position in zip(call.args[0], site.tensor_positions, strict=True):  # type: ignore[arg-type]
            if position in known.kept:
                self.held[self.base(tensor)] = call


def _site(call: torch.fx.Node) -> Site:
    return site_by_key(str(call.args[1]))


def _is_of(call: torch.fx.Node, write: torch.fx.Node) -> bool:
    """Whether a write is what the Function itself did to its argument, which follows its call in a trace."""
    source = write.args[1] if write.target is aten.copy_.default else None
    return isinstance(source, torch.fx.Node) and source.target is operator.getitem and source.args[0] is call


def _read_later(memory: _Memory, base: torch.fx.Node, later: list[torch.fx.Node]) -> bool:
    """Whether a node in ``later`` reads the memory together with its gradient."""
    return any(
        memory.base(n) is base and n not in memory.hidden
        for node in later
        if node.target not in _DETACH
        for n in node.all_input_nodes
    )
