"""Memory of a program that carries a gradient at a node, or that a Function saves for its backward."""

from __future__ import annotations

import operator

import torch

from torch2ort.program.alias_analysis import shared_with, written_by
from torch2ort.program.gradient_flow import is_float, makes_constants
from torch2ort.pythonop import Site, site_by_key

aten = torch.ops.aten
DETACHES = frozenset({aten.detach.default, aten.detach_.default})
PYTHON_OP = torch.ops.torch2ort.python_op.default


class TrackedMemory:
    """Memory that nodes share, with the gradients that it carries.

    Attributes:
        tracked: the first node of each memory that carries a gradient.
        hidden: nodes that share a memory and do not carry its gradient.
        held: the first node of each memory that a Function saves for its backward -> the Function's call.
    """

    def __init__(self) -> None:
        self._bases: dict[torch.fx.Node, torch.fx.Node] = {}
        self.tracked: set[torch.fx.Node] = set()
        self.hidden: set[torch.fx.Node] = set()
        self.held: dict[torch.fx.Node, torch.fx.Node] = {}

    def base(self, node: torch.fx.Node) -> torch.fx.Node:
        """Return the first node of the memory that ``node`` returns."""
        return self._bases.get(node, node)

    def carries(self, node: torch.fx.Node) -> bool:
        """Return True if autograd records ``node`` as carrying a gradient, by the nodes added so far."""
        return self.base(node) in self.tracked and node not in self.hidden

    def add(self, node: torch.fx.Node) -> None:
        """Add ``node``: the memory that it shares, and the gradient of its result or of its writes."""
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
            if source in self.hidden or node.target in DETACHES:
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
        """Add the memory that a call of a Function saves, if an earlier run has observed it."""
        call = node.args[0] if node.target is operator.getitem else node
        if not isinstance(call, torch.fx.Node) or call.target is not PYTHON_OP:
            return
        site = site_of(call)
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


def site_of(call: torch.fx.Node) -> Site:
    """Return the site of a call of a Function in a program."""
    return site_by_key(str(call.args[1]))


def copied_from(write: torch.fx.Node) -> torch.fx.Node | None:
    """Return the call of a Function whose result a node copies into a tensor; ``None`` for any other node."""
    source = write.args[1] if write.target is aten.copy_.default else None
    if not isinstance(source, torch.fx.Node) or source.target is not operator.getitem:
        return None
    call = source.args[0]
    return call if isinstance(call, torch.fx.Node) and call.target is PYTHON_OP else None
