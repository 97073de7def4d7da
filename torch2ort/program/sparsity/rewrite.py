"""Packed forms of a traced program."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from torch2ort._torch import aot as private
from torch2ort.errors import UnsupportedOperatorError
from torch2ort.program.alias_analysis import first_of, shared_with, written_by
from torch2ort.program.kernel_sites import is_random
from torch2ort.program.sparsity.dependence import Analysis
from torch2ort.program.sparsity.inspection import LABELS, PADDING, Inspection, input_names
from torch2ort.program.sparsity.merge_products import merge_products
from torch2ort.program.sparsity.nodes import (
    ATTENTION,
    PRODUCTS,
    args_of,
    describe,
    name_of,
    rank_of,
    shape_of,
)
from torch2ort.program.sparsity.packing import ATTENDED, READ, Packing, RowSet
from torch2ort.program.sparsity.row_axes import is_packable
from torch2ort.program.sparsity.row_values import Need, Rows
from torch2ort.program.traced_program import Constant, TracedProgram
from torch2ort.pythonop import Site
from torch2ort.sizes.renew_sizes import renew_sizes
from torch2ort.sizes.symbols import size_hint
from torch2ort.sizes.unbacked_sizes import conditions

aten = torch.ops.aten
# An operator on each element costs as much as some operations of a product.
_PER_ELEMENT = 16


def analyse(
    program: torch.fx.GraphModule, source: TracedProgram, required: Sequence[bool]
) -> tuple[Rows | None, str]:
    """Return the analysis of a program, and the reason why there is none.

    Args:
        program: a copy of the program; operators in place become functional ones.
        source: the program.
        required: for each of its inputs, whether a gradient is wanted.
    """
    graph = program.graph
    for node in list(graph.nodes):
        if "_assert_tensor_metadata" in str(node.target):
            graph.erase_node(node)
    _write_to_new_tensors(graph)
    for site in source.sites:
        if isinstance(site, Site) and site.known_result.effects:
            return None, f"{site.func_name} changes Python objects in forward"
    inputs = graph.find_nodes(op="placeholder")
    constants = [node for node, needs in zip(inputs, required, strict=True) if not needs]
    rows = Analysis(graph, constants).run()
    if rows is None:
        return None, "no input is a batch of sequences"
    memory = {first_of(node) for node in rows.values}
    for node in graph.nodes:
        if any(first_of(written) in memory for written in written_by(node)):
            return None, f"{describe(node)} writes into a tensor"
    return rows, ""


def opportunity(
    source: TracedProgram, required: Sequence[bool], positions: Mapping[str, int]
) -> tuple[Inspection | None, tuple[float, float, float], str]:
    """Return the work of a program that depends on rows.

    Args:
        source: the program.
        required: for each of its inputs, whether a gradient is wanted.
        positions: name of a feed -> its position among the feeds of the graph.

    Returns:
        The inspection that counts rows, or ``None`` if no work depends on them; the estimated operations for
        rows that are read, for those that are needed, and for all; and the operator that reads all rows.
    """
    rows, reason = analyse(copy.deepcopy(source.graph_module), source, required)
    work = dict.fromkeys(Need, 0.0)
    if rows is None or not rows.inspection.reads:
        return None, (0.0, 0.0, 0.0), reason or _reason_of(rows)
    for node, reader in rows.reasons.items():
        if reader.op == "output" and rows.values[node].live is None:
            reason = f"an output of the model has all rows of {describe(node)}; return the loss alone"
            return None, (0.0, 0.0, 0.0), reason
    for node in rows.index.graph.nodes:
        if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor):
            need = rows.need.get(node, Need.ALL)
            is_whole = need is Need.NONE or (node in rows.values and not is_packable(rows.values[node].axes))
            work[Need.ALL if is_whole else need] += _work(node)
    graph = rows.inspection
    sized, compute, used = graph.finish()
    feeds = dict(zip(graph.inputs, source.feeds, strict=True))
    inputs = tuple(_input(feeds[node], positions) for node in used)
    counts = len(graph.reads), len(graph.attended), len(graph.valid_labels)
    found = Inspection(sized, compute, inputs, counts) if work[Need.READ] or work[Need.ATTENDED] else None
    reason = "" if work[Need.ATTENDED] else _reason_of(rows)
    return found, (work[Need.READ], work[Need.ATTENDED], work[Need.ALL]), reason


def _reason_of(rows: Rows | None) -> str:
    """Return the first operator that reads all rows of a value."""
    readers = [] if rows is None else [rows.reasons[node] for node in rows.values if node in rows.reasons]
    return f"{describe(readers[0])} reads all rows" if readers else ""


def _input(feed: str | Constant, positions: Mapping[str, int]) -> Any:
    return positions[feed] if isinstance(feed, str) else feed.value


def _work(node: torch.fx.Node) -> float:
    count = 1.0
    for size in shape_of(node):
        count *= size_hint(size)
    if name_of(node) not in PRODUCTS | {"bmm", ATTENTION}:
        return _PER_ELEMENT * count
    factor = args_of(node)[1] if name_of(node) == "addmm" else args_of(node)[0]
    inner = size_hint(shape_of(factor)[-1])
    if name_of(node) == ATTENTION:
        inner = 2 * size_hint(shape_of(node)[-2])
    return 2 * inner * count


def packed_program(
    source: TracedProgram,
    required: Sequence[bool],
    plan: frozenset[str],
    counts: Mapping[str, int],
    kinds: Sequence[str],
) -> TracedProgram:
    """Return a program that computes the rows alone that are needed; its additional inputs are the last ones.

    Args:
        source: the program.
        required: for each of its inputs, whether a gradient is wanted.
        plan: ``LABELS``, ``PADDING``, or both.
        counts: the numbers of rows in the sample, by the names of the sets.
        kinds: for each mask of attention, its kind; see :meth:`Needed.kinds`.

    Raises:
        UnsupportedOperatorError: the program cannot be packed.
    """
    program = copy.deepcopy(source.graph_module)
    # Conditions on sizes that this program adds must not become conditions of the dense one.
    renew_sizes(program.graph)
    rows, reason = analyse(program, source, required)
    if rows is None:
        raise UnsupportedOperatorError(reason)
    sets: dict[Need, RowSet] = {}
    if PADDING in plan:
        sets = {Need.READ: ATTENDED, Need.ATTENDED: ATTENDED}
    if LABELS in plan:
        sets[Need.READ] = READ
    names = input_names(PADDING in plan, LABELS in plan)
    inputs = _add_inputs(program.graph, rows, names, counts)
    if not Packing(program.graph, rows, sets, inputs, kinds).run():
        raise UnsupportedOperatorError("no operator computes fewer rows")
    merge_products(program.graph)
    program.graph.eliminate_dead_code(_has_effect)
    program.recompile()
    feeds = (*source.feeds, *names)
    return replace(source, graph_module=program, feeds=feeds, conditions=conditions(program.graph))


def _has_effect(node: torch.fx.Node) -> bool:
    return node.is_impure() or is_random(node) or bool(list(written_by(node)))


def _add_inputs(
    graph: torch.fx.Graph, rows: Rows, names: Sequence[str], counts: Mapping[str, int]
) -> dict[str, torch.fx.Node]:
    """Add inputs to a program, after the others.

    Args:
        graph: the program.
        rows: its analysis.
        names: names of the inputs.
        counts: the numbers of rows in the sample, by the names of the sets.
    """
    index = rows.index.meta["val"]
    sizes = {name: private.backed_size(index.fake_mode, count, name) for name, count in counts.items()}
    found: dict[str, torch.fx.Node] = {}
    last = graph.find_nodes(op="placeholder")[-1]
    for name in names:
        of, _, kind = name.partition("_")
        shape = {"inverse": rows.sizes, "ends": rows.sizes[:1]}.get(kind, (sizes[of],))
        with graph.inserting_after(last):
            last = found[name] = graph.placeholder(name)
        with index.fake_mode:
            last.meta = {"val": torch.empty(shape, dtype=torch.int64, device=index.device)}
    return found


def _write_to_new_tensors(graph: torch.fx.Graph) -> None:
    """Replace operators in place on tensors that nothing else reads by those that return a new tensor."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        name = name_of(node)
        if not name.endswith("_") or name.endswith("__"):
            continue
        target = args_of(node)[0]
        functional = getattr(getattr(aten, name[:-1], None), node.target._overloadname, None)
        if functional is None or not isinstance(target, torch.fx.Node) or shared_with(target) is not None:
            continue
        if target.op != "call_function" or any(
            shared_with(user) is target for user in target.users if user is not node
        ):
            continue
        after = [user for user in target.users if order.get(user, -1) > order[node]]
        if rank_of(target) != rank_of(node) or node.meta["val"].dtype != target.meta["val"].dtype:
            continue
        node.target = functional
        for user in after:
            user.replace_input_with(target, node)
