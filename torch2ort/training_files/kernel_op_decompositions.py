"""Decompositions of operators that other targets run in PyTorch's kernel, for its checks or derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch2ort.program import internal_ops
from torch2ort.program.fx_inline import inline
from torch2ort.program.kernel_sites import arguments_of

aten = torch.ops.aten
_Parts = Callable[[torch.Tensor], Sequence[torch.Tensor]]


def decompose_kernel_ops(graph: torch.fx.Graph) -> None:
    """Replace these operators by others, before autograd differentiates the graph.

    Args:
        graph: changed in place.
    """
    for node in list(graph.nodes):
        make = _PARTS.get(node.target)
        if make is None:
            continue
        arguments = arguments_of(node)
        with graph.inserting_before(node):
            (result,) = inline(graph, make(arguments), [arguments["self"]])
        result.meta.update({k: v for k, v in node.meta.items() if k != "val"})
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def _one_hot(arguments: dict[str, Any]) -> _Parts:
    def run(classes: torch.Tensor) -> Sequence[torch.Tensor]:
        every = torch.arange(arguments["num_classes"], device=classes.device)
        # A look-up in a table checks its index; a comparison would silently find no class.
        found = every.index_select(0, classes.reshape(-1)).reshape(classes.shape)
        return [(found.unsqueeze(-1) == every).to(torch.int64)]

    return run


def _extreme(largest: bool) -> Callable[[dict[str, Any]], _Parts]:
    return lambda arguments: lambda numbers: [internal_ops.extreme(numbers, largest)]


_PARTS: dict[Any, Callable[[dict[str, Any]], _Parts]] = {
    aten.one_hot.default: _one_hot,
    aten.max.default: _extreme(largest=True),
    aten.min.default: _extreme(largest=False),
}
