"""Attention of packed sequences: each attends to its own tokens, without rows of padding between them."""

from __future__ import annotations

from collections.abc import Sequence
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
        lengths = _lengths(query_ends), _lengths(key_ends)
        results, sums = [], []
        for heads in zip(*_split((query,), lengths[0]), *_split((key, value), lengths[1]), strict=True):
            if heads[0].shape[2]:
                found, logarithms, *_ = _FORWARD(*heads, 0.0, is_causal, scale=scale)
                results.append(found[0].transpose(0, 1))
                sums.append(logarithms[0].transpose(0, 1))
        if not results:  # while a graph is made, tensors are of a class without data
            empty = query.new_empty(query.shape[:2], dtype=sum_dtype(query.dtype))
            return torch.empty_like(query, memory_format=torch.contiguous_format), empty
        result, logarithm = torch.cat(results), torch.cat(sums)
        ctx.mark_non_differentiable(result, logarithm)
        return result, logarithm

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
        lengths = _lengths(query_ends), _lengths(key_ends)
        found: list[tuple[torch.Tensor, ...]] = []
        of_queries, of_keys = (
            _split((grad, query, result, sums), lengths[0]),
            _split((key, value), lengths[1]),
        )
        for by, heads, results, logarithms, keys, values in zip(*of_queries, *of_keys, strict=True):
            if heads.shape[2]:
                given = by, heads, keys, values, results, logarithms
                found.append(_BACKWARD(*given, 0.0, is_causal, scale=scale))
            else:  # a key without a query has no gradient
                found.append((heads, torch.zeros_like(keys), torch.zeros_like(values)))
        if not found:
            like = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (query, key, value))
            return tuple(like)  # type: ignore[return-value]
        gradients = [
            torch.cat([part[0].transpose(0, 1) for part in parts]) for parts in zip(*found, strict=True)
        ]
        ctx.mark_non_differentiable(*gradients)
        return tuple(gradients)  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, ...]:
        """Return no gradients: second derivatives are not supported."""
        return (None,) * len(ctx.needs_input_grad)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the logarithms for queries of a dtype."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _lengths(ends: torch.Tensor) -> list[int]:
    """Return the lengths of sequences; an empty list while a graph is made."""
    if type(ends) is not torch.Tensor:
        return []
    return ends.diff(prepend=ends.new_zeros(1)).tolist()


def _split(tensors: Sequence[torch.Tensor], lengths: Sequence[int]) -> list[Sequence[torch.Tensor]]:
    """Return the parts of tensors for each sequence.

    Args:
        tensors: of shape (tokens, heads, ...).
        lengths: the tokens of each sequence.

    Returns:
        For each tensor, parts of shape (1, heads, tokens, ...).
    """
    if not lengths:
        return [() for _ in tensors]
    return [tensor.transpose(0, 1).unsqueeze(0).split(list(lengths), 2) for tensor in tensors]
