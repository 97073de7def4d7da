"""Reversible layers: backward computes each layer's input from its output, so depth does not cost memory.

:class:`Reversible` runs all layers and saves the outputs of the last one; its backward inverts each layer.
Run it with ``python examples/reversible_layers.py``.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import torch2ort

STEPS = 20


def residual(x: Tensor, weight: Tensor) -> Tensor:
    """Return the term that a layer adds to one half, computed from the other half."""
    return torch.tanh(x @ weight)


class Reversible(torch.autograd.Function):
    """Layers ``a += residual(b, f); b += residual(a, g)`` with weights ``f, g, ...`` (Gomez et al. 2017)."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        for f, g in zip(weights[::2], weights[1::2], strict=True):
            a = a + residual(b, f)
            b = b + residual(a, g)
        ctx.save_for_backward(a, b, *weights)
        return a, b

    @staticmethod
    def backward(ctx, grad_a: Tensor, grad_b: Tensor) -> tuple[Tensor, ...]:
        a, b, *weights = ctx.saved_tensors
        grads = []
        for f, g in zip(weights[-2::-2], weights[::-2], strict=True):
            b, into_a, grad_g = undone(b, a, g, grad_b)
            grad_a = grad_a + into_a
            a, into_b, grad_f = undone(a, b, f, grad_a)
            grad_b = grad_b + into_b
            grads += [grad_g, grad_f]
        return grad_a, grad_b, *reversed(grads)


def undone(half: Tensor, other: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Subtract ``residual(other, weight)`` from `half`; return it, and gradients of `other` and `weight`."""
    with torch.enable_grad():
        other, weight = other.detach().requires_grad_(), weight.detach().requires_grad_()
        added = residual(other, weight)
        grad_other, grad_weight = torch.autograd.grad(added, (other, weight), grad)
    return half - added.detach(), grad_other, grad_weight


class ReversibleNet(nn.Module):
    """A reversible body between two linear layers."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 2 * width), nn.Linear(2 * width, 1)
        self.weights = nn.ParameterList(torch.randn(width, width) / width**0.5 for _ in range(2 * layers))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x).chunk(2, -1)
        return self.last(torch.cat(Reversible.apply(a, b, *self.weights), -1))


def train(module: nn.Module, x: Tensor) -> list[float]:
    """Return the loss of each step."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.005)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (module(x)[:, 0] - x.prod(1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train with both engines from the same weights, and compare."""
    torch.manual_seed(1)
    model, x = ReversibleNet(width=16, layers=6), torch.randn(32, 4)
    module = torch2ort.ORTModule(copy.deepcopy(model))
    eager, ort = train(model, x), train(module, x)
    print(
        f"loss in {STEPS} steps: eager {eager[0]:.4f} to {eager[-1]:.4f}, ORT {ort[0]:.4f} to {ort[-1]:.4f}"
    )
    print(f"largest difference of a loss: {max(abs(a - b) for a, b in zip(eager, ort, strict=True)):.1e}")
    (node,) = module.exported.python_ops
    print(f"{len(model.weights) // 2} layers are one node, {node.node_name}, which keeps two activations")


if __name__ == "__main__":
    main()
