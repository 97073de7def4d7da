"""Decomposition of scaled dot product attention in its math form, dropout included."""

from __future__ import annotations

import math

import torch

from torch2ort.program.decomposition_table import decomposes

aten = torch.ops.aten


@decomposes(aten.scaled_dot_product_attention.default)
def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute ``softmax(query @ key.T * scale + mask) @ value``.

    A row that the mask hides completely results in zeros, as in PyTorch: the mask is added with the lowest
    finite number instead of an infinity, and such rows are cleared afterwards.
    """
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = (query * (_default_scale(query) if scale is None else scale)) @ key.transpose(-1, -2)
    lowest = torch.finfo(query.dtype).min
    alive: torch.Tensor | None = None
    if is_causal:
        seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        scores = scores + _hiding(seen, query.dtype)
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores + _hiding(attn_mask, query.dtype)
        alive = attn_mask
    elif attn_mask is not None:
        scores = scores + torch.where(attn_mask < lowest, lowest, attn_mask)
        alive = attn_mask.detach() > -math.inf
    weights = torch.softmax(scores, -1)
    if dropout_p > 0:
        weights = aten.native_dropout(weights, dropout_p, True)[0]
    result = weights @ value
    if alive is None:
        return result
    return result * alive.any(-1, keepdim=True).to(result.dtype)


def _default_scale(query: torch.Tensor) -> float | torch.Tensor:
    width: int | torch.SymInt = query.shape[-1]
    if isinstance(width, int):
        return 1 / math.sqrt(width)
    # Python's square root would fix the size.
    size = torch.scalar_tensor(width, dtype=query.dtype, device=query.device)  # type: ignore[arg-type]
    return torch.rsqrt(size)


def _hiding(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    lowest = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=seen.device)
    return torch.where(seen, torch.zeros((), dtype=dtype, device=seen.device), lowest)
