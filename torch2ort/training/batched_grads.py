"""A backward for each of a batch of gradients, as torch.autograd.grad(is_grads_batched=True) asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torch2ort._torch import autograd as private

_Gradients = Sequence[torch.Tensor | None]


def is_batched(gradients: _Gradients) -> bool:
    """Whether a backward is one for each of a batch."""
    given = [gradient for gradient in gradients if gradient is not None]
    return True in map(private.is_batched, given)


def in_turn(gradients: _Gradients, backward: Callable[..., _Gradients]) -> _Gradients:
    """What a backward gives for a batch, run once for each gradient.

    Args:
        gradients: one per output, some of them batched.
        backward: runs one, and is told by ``last=`` whether it is the last.
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
    """One gradient for each of the batch; what a Function left out for some is zero for these."""
    like = next((gradient for gradient in found if gradient is not None), None)
    if like is None:
        return None
    return private.into_batch(torch.stack([torch.zeros_like(like) if g is None else g for g in found]))
