"""Operators of ONNX next to calls of PyTorch's kernels, for files.

torch2ort's own node ``exact`` reads both: a file contains its first input, a session of torch2ort computes
the second one (graph/refinements.py).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torch2ort._torch import decompositions as private
from torch2ort._torch.dispatch import OpOverload
from torch2ort._torch.symbolic_shapes import environment, guards_taken_back
from torch2ort.errors import Torch2OrtError
from torch2ort.program import internal_ops
from torch2ort.program.fx_inline import call_of, inline
from torch2ort.support.provenance import origin_of

_PART = "torch2ort_plain"


def plain_results(
    program: torch.export.ExportedProgram,
    node: torch.fx.Node,
    is_translated: Callable[[torch.fx.Node], bool],
    decompositions: Mapping[Any, Callable[..., Any]],
) -> list[torch.fx.Node] | None:
    """Insert nodes in front of a call that compute its results by operators with translations.

    Args:
        program: the program that contains the call.
        node: the call of an operator.
        is_translated: returns True if a node has a translation.
        decompositions: decompositions of operators that have no translation.

    Returns:
        A node for each result; ``None`` where it is impossible.
    """
    graph, before = node.graph, node.prev
    with graph.inserting_before(node):
        results = _copied(node) if is_translated(node) else _decomposed(program, node, decompositions)
    parts = []
    part = before.next
    while part is not node:
        parts.append(part)
        part = part.next
    if results and all(_is_fit(part, is_translated) for part in parts):
        for part in parts:
            part.meta[_PART] = True
        return results
    for part in reversed(parts):
        graph.erase_node(part)
    return None


def drop_plain(node: torch.fx.Node) -> bool:
    """Remove the nodes for files that ``node`` belongs to, and return True, if it is such a node."""
    if _PART not in node.meta:
        return False
    parts, found = {node}, set()
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if user.target is internal_ops.exact:
                found.add(user)
            elif user not in parts:
                parts.add(user)
                stack.append(user)
    for user in found:
        user.replace_all_uses_with(user.all_input_nodes[1])
        node.graph.erase_node(user)
    for part in reversed([part for part in node.graph.nodes if _PART in part.meta]):
        if not part.users:
            node.graph.erase_node(part)
    return True


def _copied(node: torch.fx.Node) -> list[torch.fx.Node]:
    copy, value = node.graph.node_copy(node), node.meta["val"]
    if isinstance(value, torch.Tensor):
        return [copy]
    results = []
    for i, tensor in enumerate(value):
        results.append(node.graph.call_function(operator.getitem, (copy, i)))
        results[-1].meta = {**origin_of(node), "val": tensor}
    return results


def _decomposed(
    program: torch.export.ExportedProgram,
    node: torch.fx.Node,
    decompositions: Mapping[Any, Callable[..., Any]],
) -> list[torch.fx.Node] | None:
    assert isinstance(node.target, OpOverload)
    function = decompositions.get(node.target) or private.parts_of(node.target)
    given = node.all_input_nodes
    if function is None:
        return None
    sizes = environment(given[0].meta["val"]) if given else None

    call = call_of(node, function)

    def results_of(*values: Any) -> Any:
        result = call(*values)
        # A plain tuple, as a trace would call the type of a named tuple.
        return tuple(result) if isinstance(result, tuple) else result

    try:
        with private.decomposing(program), guards_taken_back(sizes) as assumed:
            results = inline(
                node.graph, results_of, given, decompositions=decompositions, origin=origin_of(node)
            )
    except (RuntimeError, TypeError, ValueError, Torch2OrtError):
        # torch's decompositions support less than its kernels.
        return None
    # A decomposition that holds for some sizes only is not used.
    return None if assumed else results


def _is_fit(node: torch.fx.Node, is_translated: Callable[[torch.fx.Node], bool]) -> bool:
    return node.target is operator.getitem or (isinstance(node.target, OpOverload) and is_translated(node))
