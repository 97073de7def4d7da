"""Quantisation with a straight-through estimator: train a network with 4-bit weights on ONNX Runtime.

Rounding has no useful gradient. :class:`Quantise` rounds in forward; its backward passes gradients through.
Run it with ``python examples/quantisation.py``. It prints:

    loss: eager 0.7205 to 0.5034, ORT 0.7205 to 0.5034
    largest difference of a loss: 6.0e-08
    values that the first layer's 256 weights have: 7
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import torch2ort


class Quantise(torch.autograd.Function):
    """Rounds to one of 15 steps between -1 and 1; the gradient is 0 where a weight was clamped."""

    @staticmethod
    def forward(ctx, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return (weight.clamp(-1, 1) * 7).round() / 7

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (weight,) = ctx.saved_tensors
        return grad * (weight.abs() <= 1)


class QuantisedLinear(nn.Linear):
    """A linear layer that computes with rounded weights, and trains the exact ones."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, Quantise.apply(self.weight), self.bias)


def train(module: nn.Module, x: Tensor, labels: Tensor) -> list[float]:
    """Return the losses of 40 steps."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    torch.manual_seed(1)
    model = nn.Sequential(QuantisedLinear(8, 32), nn.ReLU(), QuantisedLinear(32, 2))
    module = torch2ort.ORTModule(copy.deepcopy(model))
    x = torch.randn(64, 8)
    labels = (x[:, 0] * x[:, 1] > 0).long()
    eager, ort = train(model, x, labels), train(module, x, labels)
    print(f"loss: eager {eager[0]:.4f} to {eager[-1]:.4f}, ORT {ort[0]:.4f} to {ort[-1]:.4f}")
    print(f"largest difference of a loss: {max(abs(a - b) for a, b in zip(eager, ort, strict=True)):.1e}")
    weights = Quantise.apply(module.get_parameter("0.weight").detach())
    print(f"values that the first layer's {weights.numel()} weights have: {len(weights.unique())}")
