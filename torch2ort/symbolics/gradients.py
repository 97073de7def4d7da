"""Which nodes of a program carry a gradient in eager PyTorch."""

from __future__ import annotations

import torch

_STOPS = frozenset({torch.ops.aten.detach.default})


def requires_grad(program: torch.export.ExportedProgram) -> frozenset[torch.fx.Node]:
    """Nodes whose floating-point result depends on a parameter or input that requires a gradient."""
    found: set[torch.fx.Node] = set()
    for node in program.graph_module.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            if isinstance(value, torch.Tensor) and value.requires_grad:
                found.add(node)
        elif node.op == "call_function" and node.target not in _STOPS:
            if _is_float(value) and any(n in found for n in node.all_input_nodes):
                found.add(node)
    return frozenset(found)


def _is_float(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_is_float(v) for v in value)
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point
