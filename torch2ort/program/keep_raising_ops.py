"""Operators that raise an error for some values, although their results are unused.

Eager PyTorch raises the error all the same, while a graph drops unused nodes. So the results of such
operators are marked as read; for an operator that refuses indices alone, it is their check.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from torch2ort._torch.dispatch import OpOverload
from torch2ort.program import internal_ops
from torch2ort.program.alias_analysis import writes_outside
from torch2ort.program.aten_fallback_policy import may_raise
from torch2ort.program.index_checks import add_check, unproven_indices
from torch2ort.program.kernel_sites import is_random
from torch2ort.program.runtime_assertions import keep_value_checks
from torch2ort.support.provenance import origin_of

aten = torch.ops.aten
_PYTHON_OP = torch.ops.torch2ort.python_op.default


def keep_unread_checks(graph: torch.fx.Graph, program: torch.export.ExportedProgram | None = None) -> None:
    """Keep each operator and each condition that may raise an error, even if its result is unused.

    Args:
        graph: a program's nodes, not yet functional, with regions without gradient inlined; changed in place.
        program: the program, by which some indices are known to be in range.
    """
    read = _read(graph)
    for node in list(graph.nodes):
        if node in read or node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        if may_raise(node):
            with graph.inserting_before(node.next):
                force_computation(graph, node)
            continue
        for found in unproven_indices(node, program):
            with graph.inserting_before(node):
                force_computation(graph, add_check(graph, node, found))
    keep_value_checks(graph)


def _read(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Return the nodes whose numbers are read for results, writes to outside, or nodes that always run."""
    found: set[torch.fx.Node] = set()
    stack = [node for node in graph.nodes if _runs(node)]
    while stack:
        node = stack.pop()
        if node in found:
            continue
        found.add(node)
        if not _reads_shape_alone(node):
            stack.extend(node.all_input_nodes)
    return found


def _runs(node: torch.fx.Node) -> bool:
    if node.op == "output" or node.target is _PYTHON_OP or is_random(node):
        return True
    return writes_outside(node)


def _reads_shape_alone(node: torch.fx.Node) -> bool:
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    return name.startswith("aten::new_") or (name.endswith("_like") and not is_random(node))


def force_computation(graph: torch.fx.Graph, value: torch.fx.Node) -> None:
    """Keep ``value`` computed, by a node at the place where ``graph`` inserts.

    Args:
        graph: graph of ``value``; changed in place.
        value: a node with a tensor, or several, as its result.
    """
    tensor = value.meta["val"]
    origin = origin_of(value)

    def add(target: Any, arguments: tuple[Any, ...], result: torch.Tensor) -> torch.fx.Node:
        made = graph.call_function(target, arguments)
        made.meta = {**origin, "val": result}
        return made

    if isinstance(tensor, (list, tuple)):
        tensor = tensor[0]
        value = add(operator.getitem, (value, 0), tensor)
    if tensor.is_floating_point() or tensor.is_complex():
        value = add(aten.detach.default, (value,), tensor)
    add(internal_ops.must_compute, (value,), tensor.new_empty((), dtype=torch.int64))
