"""Insertion of plain PyTorch code into an existing graph as nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torch2ort._torch import fake_tensors as private
from torch2ort.errors import ExportError


def inline(
    graph: torch.fx.Graph,
    function: Callable[..., Any],
    arguments: Sequence[torch.fx.Node],
    *,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    origin: Mapping[str, Any] | None = None,
) -> list[torch.fx.Node]:
    """Trace ``function`` and insert its operators at the place where the graph inserts.

    Args:
        graph: the graph.
        function: accepts a tensor or a number for each argument, and returns a tensor or a flat sequence of
            them.
        arguments: nodes of the arguments.
        decompositions: decompositions of operators that the function calls.
        origin: metadata of the new nodes, see :func:`torch2ort.support.provenance.origin_of`.

    Returns:
        The nodes of the results.

    Raises:
        ExportError: the function reads a constant tensor of more than one number.
    """
    values = [_detached(node.meta["val"]) for node in arguments]
    mode = private.fake_mode(graph)
    assert mode is not None, "a program without tensors has no operators"
    # Tensors that the function makes of numbers are without data, too.
    with mode:
        table = dict(decompositions or {})
        traced = make_fx(function, decomposition_table=table)(*values)
        if any(_writes(node) for node in traced.graph.nodes):
            # The function writes to copies: the graph's inputs must not change.
            written = torch.func.functionalize(
                lambda *given: traced(*map(_copied, given)), remove="mutations"
            )
            traced = make_fx(written)(*values)
    traced.graph.eliminate_dead_code()
    copied: dict[torch.fx.Node, Any] = dict(
        zip(traced.graph.find_nodes(op="placeholder"), arguments, strict=True)
    )
    for node in traced.graph.nodes:
        if node.op == "call_function":
            copied[node] = made = graph.node_copy(node, copied.__getitem__)
            # The node's name in the other graph may be taken in this one.
            made.meta = {**node.meta, **(origin or {})}
        elif node.op == "get_attr":
            copied[node] = _number(graph, getattr(traced, str(node.target)), node)
        elif node.op == "output":
            results: Any = torch.fx.map_arg(node.args[0], copied.__getitem__)
            return [results] if isinstance(results, torch.fx.Node) else list(results)
    raise AssertionError("a graph without an output")


def call_of(node: torch.fx.Node, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call of ``function`` with a node's arguments, as a function of those that are nodes.

    Args:
        node: the node with the arguments.
        function: accepts all of them.
    """
    given = node.all_input_nodes

    def call(*values: Any) -> Any:
        by_node = dict(zip(given, values, strict=True))
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), by_node.__getitem__)
        return function(*args, **kwargs)

    return call


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _writes(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _number(graph: torch.fx.Graph, value: torch.Tensor, node: torch.fx.Node) -> torch.fx.Node:
    if value.numel() != 1:
        raise ExportError(
            f"a function of a training step reads a tensor of shape {tuple(value.shape)} that it makes "
            f"of numbers or finds outside. Pass it as state, or compute it of the arguments"
        )
    number = value.reshape(()).tolist()
    keywords: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
    made = graph.call_function(torch.ops.aten.full.default, (list(value.shape), number), keywords)
    made.meta = dict(node.meta)
    return made
