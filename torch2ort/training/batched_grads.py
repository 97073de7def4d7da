"""Backward of a batch of gradients, as torch.autograd.grad(is_grads_batched=True) requests it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torch2ort._torch import autograd as private

_Gradients = Sequence[torch.Tensor | None]


def is_batched(gradients: _Gradients) -> bool:
    """Return True if a gradient is a batch of gradients."""
    given = [gradient for gradient in gradients if gradient is not None]
    return True in map(private.is_batched, given)


def in_turn(gradients: _Gradients, backward: Callable[..., _Gradients]) -> _Gradients:
    """Run a backward once for each gradient of a batch, and return the batched results.

    Args:
        gradients: one per output, some of them batched.
        backward: runs one; its argument ``last`` is True for the last run.
    """
    batched = {
        i: private.out_of_batch(gradient)
        for i, gradient in enumerate(gradients)
        if gradient is not None and private.is_batched(gradient)
    }
    count = len(next(iter(batched.values())))
    results = []
    for turn in range(count):
        given = [batched[i][turn] if i in batched else gradient for i, gradient in enumerate(gradients)]
        results.append(backward(given, last=turn == count - 1))
    return [_joined(found) for found in zip(*results, strict=True)]


def _joined(found: _Gradients) -> torch.Tensor | None:
    """Return a batch of gradients; ``None`` of some runs becomes zeros."""
    like = next((gradient for gradient in found if gradient is not None), None)
    if like is None:
        return None
    return private.into_batch(torch.stack([torch.zeros_like(like) if g is None else g for g in found]))
