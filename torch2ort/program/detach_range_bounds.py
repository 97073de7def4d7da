"""Ranges between tensors, which eager makes of their numbers: no gradient reaches the tensors."""

from __future__ import annotations

import torch

from torch2ort.program.fx_insert import insert_call

aten = torch.ops.aten

_RANGES = frozenset(
    overload
    for operator in (aten.linspace, aten.logspace)
    for overload in (operator.Tensor_Tensor, operator.Tensor_Scalar, operator.Scalar_Tensor)
)


def detach_bounds(graph_module: torch.fx.GraphModule) -> None:
    """Let ``torch.linspace`` and ``torch.logspace`` take detached tensors, here and in the regions inside."""
    for module in graph_module.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if node.target in _RANGES:
                for bound in list(node.all_input_nodes):
                    if isinstance(bound.meta["val"], torch.Tensor):
                        node.replace_input_with(bound, insert_call(node, aten.detach.default, bound))
