"""Writes that autograd does not see: in place, under ``torch.no_grad()`` or through a detached tensor.

Eager PyTorch gives the written tensor its new values and leaves its gradient as it was. In a graph the new
values would come with their own gradient, which is none.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch

from torch2ort.errors import UnsupportedOperatorError
from torch2ort.symbolics.gradients import is_float, makes_constants
from torch2ort.symbolics.source import source_line

aten = torch.ops.aten
_DETACH = frozenset({aten.detach.default, aten.detach_.default})


def refuse_hidden_writes(graph: torch.fx.Graph) -> None:
    """Refuse a write that autograd does not see, into a tensor that carries a gradient and is read later.

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
    """

    def __init__(self) -> None:
        self._bases: dict[torch.fx.Node, torch.fx.Node] = {}
        self.tracked: set[torch.fx.Node] = set()
        self.hidden: set[torch.fx.Node] = set()

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
        if makes_constants(node.target):
            return
        if is_float(value) and any(self.carries(n) for n in node.all_input_nodes):
            written = list(written_by(node))
            self.tracked.update(self.base(n) for n in written if n not in self.hidden)
            if source is None and not written:
                self.tracked.add(node)


def _read_later(memory: _Memory, base: torch.fx.Node, later: list[torch.fx.Node]) -> bool:
    """Whether a node in ``later`` reads the memory together with its gradient."""
    return any(
        memory.base(n) is base and n not in memory.hidden
        for node in later
        if node.target not in _DETACH
        for n in node.all_input_nodes
    )


def shared_with(node: torch.fx.Node) -> torch.fx.Node | None:
    """The argument whose memory ``node`` returns; ``None`` if it returns memory of its own."""
    if node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, torch.fx.Node)
        return source if shared_with(source) is not None else None
    schema = getattr(node.target, "_schema", None)
    if schema is None or not any(r.alias_info is not None for r in schema.returns):
        return None
    for argument, value in zip(schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and isinstance(value, torch.fx.Node):
            return value if _dtype(value) == _dtype(node) else None
    return None


def tensor_itself(node: torch.fx.Node) -> torch.fx.Node:
    """The node that made the tensor which ``node`` returns after writing into it."""
    while (source := shared_with(node)) is not None and source in written_by(node):
        node = source
    return node


def written_by(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The arguments that ``node`` writes into."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return
    for argument, value in zip(schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            values = value if isinstance(value, (list, tuple)) else (value,)
            yield from (v for v in values if isinstance(v, torch.fx.Node))


def _dtype(node: torch.fx.Node) -> object:
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)):
        value = value[0] if value else None
    return getattr(value, "dtype", None)
