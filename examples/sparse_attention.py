"""Sparse attention: weights that are exactly zero, by a Function with a backward written by hand.

:class:`Sparsemax` turns scores into probabilities, most of which are 0. Its backward needs no sort.
Run it with ``python examples/sparse_attention.py``. It prints:

    loss: eager 1.3113 to 0.7145, ORT 1.3113 to 0.7145
    largest difference of a loss: 1.8e-07
    attention weights that are 0: 76%
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import torch2ort


class Sparsemax(torch.autograd.Function):
    """The probabilities ``[..., n]`` nearest to scores ``[..., n]`` (Martins and Astudillo 2016)."""

    @staticmethod
    def forward(ctx, scores: Tensor) -> Tensor:
        ordered = scores.sort(-1, descending=True).values
        count = torch.arange(1, scores.shape[-1] + 1, dtype=scores.dtype)
        sums = ordered.cumsum(-1)
        kept = (1 + count * ordered > sums).sum(-1, keepdim=True)
        threshold = (sums.gather(-1, kept - 1) - 1) / kept
        weights = (scores - threshold).clamp(min=0)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        kept = (weights > 0).to(grad.dtype)
        mean = (grad * kept).sum(-1, keepdim=True) / kept.sum(-1, keepdim=True)
        return kept * (grad - mean)


class Attention(nn.Module):
    """One head, which returns its weights, too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.scale = width**-0.5

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.query(x) @ self.key(x).transpose(-2, -1)
        weights = Sparsemax.apply(scores * self.scale)
        return weights @ self.value(x), weights


def train(module: nn.Module, x: Tensor) -> list[float]:
    """Return the losses of 20 steps, in which each token is to become the one before it."""
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        out, _ = module(x)
        loss = (out[:, 1:] - x[:, :-1]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    torch.manual_seed(1)
    model, x = Attention(16), torch.randn(8, 12, 16)
    module = torch2ort.ORTModule(copy.deepcopy(model))
    eager, ort = train(model, x), train(module, x)
    _, weights = module(x)
    print(f"loss: eager {eager[0]:.4f} to {eager[-1]:.4f}, ORT {ort[0]:.4f} to {ort[-1]:.4f}")
    print(f"largest difference of a loss: {max(abs(a - b) for a, b in zip(eager, ort, strict=True)):.1e}")
    print(f"attention weights that are 0: {(weights == 0).float().mean():.0%}")
