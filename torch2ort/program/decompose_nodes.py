"""Decompositions of a functional program, node by node."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torch2ort._torch import decompositions as private
from torch2ort._torch.fake_tensors import fake_mode
from torch2ort._torch.onnx_exporter import sync_output_names
from torch2ort.program.fx_inline import call_of, inline
from torch2ort.program.fx_insert import replace_call
from torch2ort.support.provenance import origin_of

aten = torch.ops.aten
_COUNT = aten.sym_numel.default


def decompose_nodes(
    program: torch.export.ExportedProgram, decompositions: Mapping[Any, Callable[..., Any]]
) -> None:
    """Decompose the nodes whose operators are in a table, in place.

    torch.export would trace the whole program again, twice, although few nodes of it change.

    Args:
        program: a functional program; changed in place.
        decompositions: operator -> function that computes it by other operators, or returns
            ``NotImplemented``.

    Raises:
        ExportError: a decomposition creates a constant tensor of more than one number.
    """
    graph = program.graph
    with private.decomposing(program):
        for node in list(graph.nodes):
            if not isinstance(node.target, private.OpOverload):
                continue
            if node.target is _COUNT or isinstance(node.meta.get("val"), int):
                continue
            function = decompositions.get(node.target) or private.parts_of(node.target)
            if function is not None:
                _decompose(node, function, decompositions)
    # Decompositions read sizes, too.
    for node in list(graph.nodes):
        if isinstance(node.target, private.OpOverload) and isinstance(node.meta.get("val"), int):
            _write_number(node)
        elif node.target is _COUNT:
            _multiply_sizes(node)
    graph.eliminate_dead_code()
    private.remove_assertions(program.graph_module)
    sync_output_names(program)


def _write_number(node: torch.fx.Node) -> None:
    """Replace a size that does not vary by its number in the nodes that read it."""
    number = node.meta["val"]

    def written(read: torch.fx.Node) -> Any:
        return number if read is node else read

    for user in list(node.users):
        user.args, user.kwargs = torch.fx.node.map_arg((user.args, user.kwargs), written)


def _multiply_sizes(node: torch.fx.Node) -> None:
    """Compute a varying number of elements from the sizes, as a trace does."""
    (source,) = node.all_input_nodes
    sizes = source.meta["val"].shape
    count: Any = math.prod(size for size in sizes if isinstance(size, int))
    value = count
    with node.graph.inserting_before(node):
        for dim, size in enumerate(sizes):
            if isinstance(size, int):
                continue
            factor = node.graph.call_function(aten.sym_size.int, (source, dim))
            factor.meta = {**origin_of(node), "val": size}
            value *= size
            count = node.graph.call_function(operator.mul, (count, factor))
            count.meta = {**origin_of(node), "val": value}
    node.replace_all_uses_with(count)
    node.graph.erase_node(node)


def _decompose(
    node: torch.fx.Node, function: Callable[..., Any], decompositions: Mapping[Any, Callable[..., Any]]
) -> None:
    given, call = node.all_input_nodes, call_of(node, function)
    # Most decompositions return NotImplemented, which a call without a trace finds out.
    with fake_mode(node.graph) or contextlib.nullcontext():
        if call(*(n.meta["val"] for n in given)) is NotImplemented:
            return
    with node.graph.inserting_before(node):
        results = inline(node.graph, call, given, decompositions=decompositions, origin=origin_of(node))
    replace_call(node, results)
