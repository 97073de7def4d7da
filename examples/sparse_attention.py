"""Sparse attention: weights that are exactly zero, by a Function with a backward written by hand.

:class:`Sparsemax` turns scores into probabilities, most of which are 0. Its backward needs no sort.
Run it with ``python examples/sparse_attention.py``.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import torch2ort

STEPS = 20


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


def train(module: nn.Module, x: Tensor) -> tuple[list[float], Tensor]:
    """Return the loss of each step (each token is to become the one before it), and the last weights."""
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        out, weights = module(x)
        loss = (out[:, 1:] - x[:, :-1]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, weights.detach()


def main() -> None:
    """Train with both engines from the same weights, and compare."""
    torch.manual_seed(1)
    model, x = Attention(16), torch.randn(8, 12, 16)
    (eager, _), (ort, weights) = train(copy.deepcopy(model), x), train(torch2ort.ORTModule(model), x)
    print(
        f"loss in {STEPS} steps: eager {eager[0]:.4f} to {eager[-1]:.4f}, ORT {ort[0]:.4f} to {ort[-1]:.4f}"
    )
    print(f"largest difference of a loss: {max(abs(a - b) for a, b in zip(eager, ort, strict=True)):.1e}")
    print(f"attention weights that are 0: {(weights == 0).float().mean():.0%}")


if __name__ == "__main__":
    main()
