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
            and _is_float(value)
            and not _makes_constants(node.target)
            and any(n in found for n in node.all_input_nodes)
        ):
            found.add(node)
    return frozenset(found)


def _makes_constants(target: object) -> bool:
    """Whether an operator reads nothing of its arguments but their shape and type, or stops the gradient."""
    schema = getattr(target, "_schema", None)
    return schema is not None and _CONSTANTS.match(schema.name) is not None


def _is_float(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_is_float(v) for v in value)
    return isinstance(value, torch.Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex)
