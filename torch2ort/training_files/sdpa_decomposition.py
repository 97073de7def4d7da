"""Decomposition of attention to products and a softmax, before autograd chooses a kernel's derivative."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from torch2ort.program.fx_inline import inline
from torch2ort.program.kernel_sites import arguments_of

aten = torch.ops.aten
_ATTENTION = aten.scaled_dot_product_attention.default


def write_out(graph: torch.fx.Graph) -> None:
    """Replace each attention by its parts.

    Args:
        graph: changed in place.
    """
    for node in list(graph.nodes):
        if node.target is not _ATTENTION:
            continue
        arguments = arguments_of(node)
        tensors = [arguments[name] for name in ("query", "key", "value")]
        mask = arguments.get("attn_mask")
        if mask is not None:
            tensors.append(mask)
        with graph.inserting_before(node):
            (result,) = inline(graph, _parts(arguments), tensors)
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def _parts(arguments: dict[str, Any]) -> Callable[..., list[torch.Tensor]]:
    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *mask: torch.Tensor) -> Any:
        hidden = mask[0] if mask else None
        if hidden is not None and hidden.dtype == torch.bool:
            # PyTorch's caller of these parts converts the mask in the same way.
            seen = torch.zeros((), dtype=query.dtype, device=query.device)
            hidden = torch.where(hidden, seen, torch.full_like(seen, -math.inf))
        output, _ = aten._scaled_dot_product_attention_math(
            query,
            key,
            value,
            hidden,
            arguments.get("dropout_p", 0.0),
            arguments.get("is_causal", False),
            None,
            scale=arguments.get("scale"),
            enable_gqa=arguments.get("enable_gqa", False),
        )
        return [output]

    return run
