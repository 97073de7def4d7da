"""Sizes that torch.export took for others although only a run tells them.

Where a size of 1 would be broadcast and nobody knows the size, it takes it for the other size, writes a check
into the program, and goes on with what it took. The checks are no part of a graph.
"""

from __future__ import annotations

import operator

import torch

from torch2ort.sizes import _torch_private as private


def conditions(graph: torch.fx.Graph) -> int:
    """How many conditions on sizes the trace of a program, and all that was made of it, rely on by now."""
    for node in graph.nodes:
        environment = private.environment(node.meta.get("val"))
        if environment is not None:
            return private.conditions(environment)
    return 0


def takes_for_equal(program: torch.export.ExportedProgram) -> bool:
    """Whether a size was taken for another one, be it that eager would raise if they differ."""
    return any(node.target is operator.eq for node in _conditions(program))


def expands_unknown(program: torch.export.ExportedProgram) -> torch.fx.Node | None:
    """A node of an ``expand`` of such a size: by what was taken it does nothing, and the graph lacks it."""
    conditions = _conditions(program)
    for node in conditions:
        # That it is 1 or the size wanted, and then that it is the latter.
        if node.target is operator.or_ and any(part in conditions for part in node.args):
            return node
    return None


def _conditions(program: torch.export.ExportedProgram) -> dict[torch.fx.Node, None]:
    checks = [node.args[0] for node in program.graph.nodes if node.target is private.ASSERT]
    return dict.fromkeys(condition for condition in checks if isinstance(condition, torch.fx.Node))
