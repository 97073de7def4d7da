"""Detaching of tensors that bound a range: eager reads their numbers, and no gradient reaches them."""

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
    """Detach the tensor arguments of ``torch.linspace`` and ``torch.logspace``, in regions too."""
    for module in graph_module.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if node.target in _RANGES:
                for bound in list(node.all_input_nodes):
                    if isinstance(bound.meta["val"], torch.Tensor):
                        node.replace_input_with(bound, insert_call(node, aten.detach.default, bound))
