"""Plain PyTorch code as nodes of a graph that is there already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torch2ort.errors import ExportError


def inline(
    graph: torch.fx.Graph, function: Callable[..., Sequence[torch.Tensor]], arguments: Sequence[torch.fx.Node]
) -> list[torch.fx.Node]:
    """Put what ``function`` computes where the graph inserts.

    Args:
        graph: the graph.
        function: takes a tensor for each argument and gives a flat sequence of tensors.
        arguments: nodes that give tensors.

    Returns:
        The nodes of the results.

    Raises:
        ExportError: the function reads a tensor of its own that is no number.
    """
    values = [node.meta["val"].detach() for node in arguments]
    # Its tensors of numbers are without data, too.
    with values[0].fake_mode:
        traced = make_fx(function)(*values)
        if any(_writes(node) for node in traced.graph.nodes):
            # What it writes to is a copy: an input of the graph stays what it was given.
            written = torch.func.functionalize(
                lambda *given: traced(*(value.clone() for value in given)), remove="mutations"
            )
            traced = make_fx(written)(*values)
    traced.graph.eliminate_dead_code()
    copied: dict[torch.fx.Node, Any] = dict(
        zip(traced.graph.find_nodes(op="placeholder"), arguments, strict=True)
    )
    for node in traced.graph.nodes:
        if node.op == "call_function":
            copied[node] = made = graph.node_copy(node, copied.__getitem__)
            # What it was called in the other graph may be taken in this one.
            made.meta = dict(node.meta)
        elif node.op == "get_attr":
            copied[node] = _number(graph, getattr(traced, str(node.target)), node)
        elif node.op == "output":
            results: Any = torch.fx.map_arg(node.args[0], copied.__getitem__)
            return list(results)
    raise AssertionError("a graph without an output")


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
