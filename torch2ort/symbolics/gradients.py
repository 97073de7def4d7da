"""Which nodes of a program carry a gradient in eager PyTorch."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

_CONSTANTS = re.compile(r"aten::(detach|\w+_like|new_\w+)$")


def requires_grad(program: torch.export.ExportedProgram) -> frozenset[torch.fx.Node]:
    """Nodes whose floating-point result depends on a parameter or input that requires a gradient."""
    graph = program.graph_module.graph
    values = ((node, node.meta.get("val")) for node in graph.find_nodes(op="placeholder"))
    return carrying(graph, (n for n, v in values if isinstance(v, torch.Tensor) and v.requires_grad))


def carrying(graph: torch.fx.Graph, required: Iterable[torch.fx.Node]) -> frozenset[torch.fx.Node]:
    """Nodes whose floating-point result depends on one of ``required``, and those themselves."""
    found = set(required)
    for node in graph.nodes:
        if (
            node.op == "call_function"
            and is_float(node.meta.get("val"))
            and not makes_constants(node.target)
            and any(n in found for n in node.all_input_nodes)
        ):
            found.add(node)
    return frozenset(found)


def makes_constants(target: object) -> bool:
    """Tell whether an operator stops the gradient, or reads but the shape and type of its arguments."""
    schema = getattr(target, "_schema", None)
    return schema is not None and _CONSTANTS.match(schema.name) is not None


def is_float(value: object) -> bool:
    """Tell whether a node's value is a tensor that may carry a gradient, or holds one."""
    if isinstance(value, (list, tuple)):
        return any(is_float(v) for v in value)
    return isinstance(value, torch.Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex)
