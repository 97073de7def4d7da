"""Which nodes of a program carry a gradient in eager PyTorch."""

from __future__ import annotations

import re

import torch

_CONSTANTS = re.compile(r"aten::(detach|\w+_like|new_\w+)$")


def requires_grad(program: torch.export.ExportedProgram) -> frozenset[torch.fx.Node]:
    """Nodes whose floating-point result depends on a parameter or input that requires a gradient."""
    found: set[torch.fx.Node] = set()
    for node in program.graph_module.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            if isinstance(value, torch.Tensor) and value.requires_grad:
                found.add(node)
        elif (
            node.op == "call_function"
            and is_float(value)
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
