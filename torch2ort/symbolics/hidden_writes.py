"""Writes in place that a graph cannot do: what autograd does not see, or what a Function holds.

Under ``torch.no_grad()`` or through a detached tensor, eager PyTorch gives the written tensor its new values
and leaves its gradient as it was. In a graph the new values would come with their own gradient, which is
none. What a Function holds for its backward is the very memory that is written to; in a graph a write makes
a new tensor, and the Function would read the old one.
"""

from __future__ import annotations

import torch

from torch2ort.errors import UnsupportedOperatorError
from torch2ort.symbolics.shared_memory import written_by
from torch2ort.symbolics.source import source_line
from torch2ort.symbolics.tracked_memory import DETACHES, TrackedMemory, copied_from, site_of


def refuse_hidden_writes(graph: torch.fx.Graph) -> None:
    """Refuse a write that autograd does not see, into a tensor that carries a gradient and is read later.

    So is a write to what an earlier call of a Function holds for its backward.

    Args:
        graph: a program's nodes, not yet functional; what a region without gradient reads is detached.

    Raises:
        UnsupportedOperatorError: there is one; names its line.
    """
    memory = TrackedMemory()
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
        memory.add(node)


def _read_later(memory: TrackedMemory, base: torch.fx.Node, later: list[torch.fx.Node]) -> bool:
    """Whether a node in ``later`` reads the memory together with its gradient."""
    return any(
        memory.base(n) is base and n not in memory.hidden
        for node in later
        if node.target not in DETACHES
        for n in node.all_input_nodes
    )
