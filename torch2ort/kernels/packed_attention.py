"""Attention of packed sequences: each attends to its own tokens, without rows of padding between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import Function

aten = torch.ops.aten
_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class PackedAttention(Function):
    """Attention of packed sequences, and the logarithm of each query's sum of exponentials."""

    @staticmethod
    def forward(
        ctx: Any,
        is_causal: bool,
        scale: float | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_ends: torch.Tensor,
        key_ends: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result, of the shape of ``query``, and the logarithms, of shape (tokens, heads).

        Args:
            ctx: the context.
            is_causal: whether a token attends to no later ones.
            scale: factor of the scores; ``None`` for one by the square root of the size of a head.
            query: of shape (tokens, heads, size), the sequences one after the other.
            key: likewise.
            value: likewise.
            query_ends: for each sequence, the number of queries up to its end.
            key_ends: for each sequence, the number of keys up to its end.
        """
        result = torch.empty_like(query, memory_format=torch.contiguous_format)
        sums = query.new_empty(query.shape[:2], dtype=sum_dtype(query.dtype))
        for queries, keys in _sequences(query_ends, key_ends):
            found, logarithms, *_ = _FORWARD(
                *(_heads_first(t[s]) for t, s in ((query, queries), (key, keys), (value, keys))),
                0.0,
                is_causal,
                scale=scale,
            )
            result[queries] = found[0].transpose(0, 1)
            sums[queries] = logarithms[0].transpose(0, 1)
        ctx.mark_non_differentiable(result, sums)
        return result, sums

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, ...]:
        """Return no gradients: the graph has a node for them."""
        return (None,) * len(ctx.needs_input_grad)


class PackedAttentionGrad(Function):
    """The gradients of :class:`PackedAttention`."""

    @staticmethod
    def forward(
        ctx: Any, is_causal: bool, scale: float | None, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of query, key and value.

        Args:
            ctx: the context.
            is_causal: as for forward.
            scale: as for forward.
            tensors: the result's gradient, then query, key, value, the results and the ends of forward.
        """
        grad, query, key, value, result, sums, query_ends, key_ends = tensors
        # A key without a query has no gradient.
        found = tuple(torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (query, key, value))
        for queries, keys in _sequences(query_ends, key_ends):
            places = (queries, keys, keys)
            given = zip((grad, query, key, value, result), (queries, *places, queries), strict=True)
            parts = _BACKWARD(
                *(_heads_first(t[s]) for t, s in given),
                sums[queries].transpose(0, 1).unsqueeze(0).contiguous(),
                0.0,
                is_causal,
                scale=scale,
            )
            for whole, place, part in zip(found, places, parts, strict=True):
                whole[place] = part[0].transpose(0, 1)
        ctx.mark_non_differentiable(*found)
        return found  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, ...]:
        """Return no gradients: second derivatives are not supported."""
        return (None,) * len(ctx.needs_input_grad)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the logarithms for queries of a dtype."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _sequences(query_ends: torch.Tensor, key_ends: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the queries and the keys of each sequence that has some."""
    if type(query_ends) is not torch.Tensor:
        return  # while a graph is made, tensors are of a class without data
    first = last = 0
    for query, key in zip(query_ends.tolist(), key_ends.tolist(), strict=True):
        if query > first and key > last:
            yield slice(first, query), slice(last, key)
        first, last = query, key


def _heads_first(tokens: torch.Tensor) -> torch.Tensor:
    """Return tokens of shape (tokens, heads, size) as (1, heads, tokens, size)."""
    return tokens.transpose(0, 1).unsqueeze(0)
