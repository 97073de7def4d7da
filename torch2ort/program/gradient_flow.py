"""Nodes of a program that carry a gradient in eager PyTorch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

import torch

from torch2ort.program.alias_analysis import sources_of, written_by

_CONSTANTS = re.compile(r"aten::(detach|\w+_like|new_\w+)$")


def is_required(placeholder: torch.fx.Node) -> bool:
    """Return True if an input of a program is a tensor that requires a gradient."""
    value = placeholder.meta.get("val")
    return isinstance(value, torch.Tensor) and value.requires_grad


def carrying(graph: torch.fx.Graph, required: Iterable[torch.fx.Node]) -> frozenset[torch.fx.Node]:
    """Return the nodes whose floating-point result depends on one of ``required``, and those themselves.

    A tensor that such a result is written into is included, with all nodes that share its memory, earlier
    ones too.
    """
    found, more = set[torch.fx.Node](), set(required)
    # One pass is enough, unless a node writes into a tensor without a gradient so far.
    while not more <= found:
        found |= more
        for node in graph.nodes:
            if node in found or _carries(node, found):
                found.add(node)
                more.update(source for written in written_by(node) for source in sources_of(written))
    return frozenset(found)


def _carries(node: torch.fx.Node, found: Collection[torch.fx.Node]) -> bool:
    return (
        node.op == "call_function"
        and is_float(node.meta.get("val"))
        and not makes_constants(node.target)
        and any(n in found for n in node.all_input_nodes)
    )


def makes_constants(target: object) -> bool:
    """Return True if an operator stops the gradient, or reads only the shape and type of its arguments."""
    schema = getattr(target, "_schema", None)
    return schema is not None and _CONSTANTS.match(schema.name) is not None


def is_float(value: object) -> bool:
    """Return True if a node's value is a tensor that may carry a gradient, or contains one."""
    if isinstance(value, (list, tuple)):
        return any(is_float(v) for v in value)
    return isinstance(value, torch.Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex)
