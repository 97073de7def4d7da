"""Refusal of in-place writes that a graph cannot repeat, as autograd or a Function needs the old values.

Under ``torch.no_grad()`` or through a detached tensor, eager PyTorch writes new values into a tensor and
keeps its gradient. In a graph the new values would have their own gradient, which is none. A tensor that a
Function saves for its backward, or an operator for its derivative, is the very memory that is written to; in
a graph a write creates a new tensor, and the old one would be read.
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
    """Refuse a write that autograd does not record, into a tensor whose old values it needs.

    Such a tensor carries a gradient and is read later, or the derivative of an earlier operator reads it. A
    write to a tensor that an earlier call of a Function saved for its backward is refused, too.

    Args:
        graph: a program's nodes, not yet functional; values that a region without gradient reads are
            detached.

    Raises:
        UnsupportedOperatorError: there is such a write; the message names its line.
    """
    memory = TrackedMemory()
    readers = _Readers(memory)
    nodes = list(graph.nodes)
    for position, node in enumerate(nodes):
        for target in written_by(node):
            base = memory.base(target)
            holder = memory.held.get(base)
            # In a trace, the writes of the Function itself to its argument follow its call.
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
        memory: the memory that nodes share; both have processed the same nodes.
    """

    def __init__(self, memory: TrackedMemory) -> None:
        self._memory = memory
        self._of = defaultdict[torch.fx.Node, list[tuple[torch.fx.Node, frozenset[torch.fx.Node]]]](list)

    def add(self, node: torch.fx.Node) -> None:
        """Add the memory that a node reads and makes, before the node is added to ``memory``."""
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
        """Return the operator whose derivative reads memory that a write would change unrecorded by autograd.

        Args:
            base: the first node of the memory.
            hidden: True if autograd does not record the write; otherwise only hidden reads are considered.
        """
        for node, carried in self._of[base]:
            for saved in saved_for_backward(node, carried):
                if self._memory.base(saved) is base and (hidden or saved in self._memory.hidden):
                    return node
        return None


def _read_later(memory: TrackedMemory, base: torch.fx.Node, later: list[torch.fx.Node]) -> bool:
    """Return True if a node in ``later`` reads the memory together with its gradient."""
    return any(
        memory.base(n) is base and n not in memory.hidden
        for node in later
        if node.target not in DETACHES
        for n in node.all_input_nodes
    )
