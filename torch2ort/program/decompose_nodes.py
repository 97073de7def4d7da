"""Decompositions of a functional program, node by node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch2ort._torch import decompositions as private
from torch2ort._torch.onnx_exporter import remove_assertions, sync_output_names
from torch2ort.program.fx_inline import inline
from torch2ort.program.fx_insert import replace_call
from torch2ort.support.provenance import origin_of


class _DeclinedError(Exception):
    """A decomposition leaves a call as it is."""


def decompose_nodes(
    program: torch.export.ExportedProgram, decompositions: Mapping[Any, Callable[..., Any]]
) -> None:
    """Decompose the nodes that a table names, where they are.

    torch.export would trace the whole program again, twice, and few nodes of it change.

    Args:
        program: a functional program; changed in place.
        decompositions: operator -> what computes the same with others, or returns ``NotImplemented``.

    Raises:
        ExportError: a decomposition makes a tensor of more than one number.
    """
    graph = program.graph
    with private.decomposing(program):
        for node in list(graph.nodes):
            if not isinstance(node.target, private.OpOverload):
                continue
            function = decompositions.get(node.target) or private.parts_of(node.target)
            if function is not None:
                _decompose(node, function, decompositions)
    graph.eliminate_dead_code()
    remove_assertions(program)
    sync_output_names(program)


def _decompose(
    node: torch.fx.Node, function: Callable[..., Any], decompositions: Mapping[Any, Callable[..., Any]]
) -> None:
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    given = list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, torch.fx.Node)))

    def call(*values: Any) -> Any:
        by_node = dict(zip(given, values, strict=True))
        own = [by_node[leaf] if isinstance(leaf, torch.fx.Node) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(own, spec)
        result = function(*args, **kwargs)
        if result is NotImplemented:
            raise _DeclinedError
        return result

    graph = node.graph
    with graph.inserting_before(node):
        try:
            results = inline(graph, call, given, decompositions=decompositions, origin=origin_of(node))
        except _DeclinedError:
            return
    replace_call(node, results)
