"""Writes in place that a graph cannot do: what autograd does not see, or what a Function holds.

Under ``torch.no_grad()`` or through a detached tensor, eager PyTorch gives the written tensor its new values
and leaves its gradient as it was. In a graph the new values would come with their own gradient, which is
none. What a Function holds for its backward, or an operator for its derivative, is the very memory that is
written to; in a graph a write makes a new tensor, and the old one would be read.
"""

from __future__ import annotations

import operator
from collections import defaultdict

import torch

from torch2ort.errors import UnsupportedOperatorError
from torch2ort.program.alias_analysis import written_by
from torch2ort.program.autograd_saved import saved_for_backward
from torch2ort.program.gradient_flow import is_float, makes_constants
from torch2ort.program.gradient_storage import DETACHES, PYTHON_OP, TrackedMemory, copied_from, site_of
from torch2ort.support.provenance import source_line


def refuse_hidden_writes(graph: torch.fx.Graph) -> None:
    """Refuse a write that autograd does not see, into a tensor of which it needs what was there.

    That is one that carries a gradient and is read later, or that the derivative of an earlier operator
    reads. So is a write to what an earlier call of a Function holds for its backward.

    Args:
        graph: a program's nodes, not yet functional; what a region without gradient reads is detached.

    Raises:
        UnsupportedOperatorError: there is one; names its line.
    """
    memory = TrackedMemory()
    readers = _Readers(memory)
    nodes = list(graph.nodes)
    for position, node in enumerate(nodes):
        for target in written_by(node):
            base = memory.base(target)
            holder = memory.held.get(base)
            # What the Function itself did to its argument follows its call in a trace.
            if holder is not None and copied_from(node) is not holder:
                raise UnsupportedOperatorError(
                    f"{node.target} at {source_line(node)} writes into a tensor that "
                    f"{site_of(holder).func_name} holds for its backward. Eager PyTorch refuses the "
                    f"backward, or reads what was written, and a graph cannot. Write into a clone of it"
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
            reader = readers.of_derivative(base, hidden=target in memory.hidden)
            if reader is not None:
                raise UnsupportedOperatorError(
                    f"{node.target} at {source_line(node)} writes into a tensor that the derivative of "
                    f"{reader.target} at {source_line(reader)} reads, where autograd does not see it: inside "
                    f"torch.no_grad() or through a detached tensor. Eager PyTorch refuses the backward, or "
                    f"reads what was written, and a graph cannot. Write into a clone of it"
                )
        readers.add(node)
        memory.add(node)


class _Readers:
    """The operators with a derivative that read or made each memory so far.

    Args:
        memory: what the program's nodes share; it has come to the same node.
    """

    def __init__(self, memory: TrackedMemory) -> None:
        self._memory = memory
        self._of = defaultdict[torch.fx.Node, list[tuple[torch.fx.Node, frozenset[torch.fx.Node]]]](list)

    def add(self, node: torch.fx.Node) -> None:
        """Note what a node reads and makes, before its memory is noted."""
        if node.op != "call_function" or node.target is PYTHON_OP:
            return
        if node.target is operator.getitem:
            call = node.args[0]
            assert isinstance(call, torch.fx.Node)
            self._of[node].extend(self._of[call])
            return
        carried = frozenset(filter(self._memory.carries, node.all_input_nodes))
        if carried and is_float(node.meta.get("val")) and not makes_constants(node.target):
            for base in {node, *map(self._memory.base, node.all_input_nodes)}:
                self._of[base].append((node, carried))

    def of_derivative(self, base: torch.fx.Node, *, hidden: bool) -> torch.fx.Node | None:
        """The operator whose derivative reads a memory in a way that autograd does not see.

        Args:
            base: the first node of the memory.
            hidden: whether what comes next to it is hidden; else only what was read in a hidden way counts.
        """
        for node, carried in self._of[base]:
            for saved in saved_for_backward(node, carried):
                if self._memory.base(saved) is base and (hidden or saved in self._memory.hidden):
                    return node
        return None


def _read_later(memory: TrackedMemory, base: torch.fx.Node, later: list[torch.fx.Node]) -> bool:
    """Whether a node in ``later`` reads the memory together with its gradient."""
    return any(
        memory.base(n) is base and n not in memory.hidden
        for node in later
        if node.target not in DETACHES
        for n in node.all_input_nodes
    )
