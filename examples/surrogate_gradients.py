"""Surrogate gradients: train a spiking network, whose neurons fire or do not, on ONNX Runtime.

A step function has no useful gradient. :class:`Spike` computes a step in forward; its backward is the slope
of a smooth function.
Run it with ``python examples/surrogate_gradients.py``. It prints:

    loss: eager 0.6861 to 0.5060, ORT 0.6861 to 0.5060
    largest difference of a loss: 6.0e-08
    neurons fire in 23% of all steps in time
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import torch2ort


class Spike(torch.autograd.Function):
    """1 where the membrane is above 0, else 0; in backward a fast sigmoid (Zenke and Ganguli 2018)."""

    @staticmethod
    def forward(ctx, membrane: Tensor, slope: float) -> Tensor:
        ctx.save_for_backward(membrane)
        ctx.slope = slope
        return (membrane > 0).to(membrane.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (membrane,) = ctx.saved_tensors
        return grad / (ctx.slope * membrane.abs() + 1) ** 2, None


class SpikingNet(nn.Module):
    """Leaky integrate-and-fire neurons, from ``[batch, time, features]`` to scores of classes."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(features, hidden), nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        currents = self.first(x)
        membrane, spikes = torch.zeros_like(currents[:, 0]), []
        for current in currents.unbind(1):
            membrane = 0.9 * membrane + current
            spikes.append(Spike.apply(membrane - 1, 25.0))
            membrane = membrane - spikes[-1]
        fired = torch.stack(spikes, 1)
        return self.last(fired).mean(1), fired.mean()


def train(module: nn.Module, x: Tensor, labels: Tensor) -> list[float]:
    """Return the losses of 20 steps."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(x)[0], labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    torch.manual_seed(1)
    model = SpikingNet(6, 32, 2)
    labels = torch.arange(32) % 2
    x = torch.rand(32, 8, 6) + labels[:, None, None] * 0.5
    module = torch2ort.ORTModule(copy.deepcopy(model))
    eager, ort = train(model, x, labels), train(module, x, labels)
    print(f"loss: eager {eager[0]:.4f} to {eager[-1]:.4f}, ORT {ort[0]:.4f} to {ort[-1]:.4f}")
    print(f"largest difference of a loss: {max(abs(a - b) for a, b in zip(eager, ort, strict=True)):.1e}")
    print(f"neurons fire in {module(x)[1]:.0%} of all steps in time")
