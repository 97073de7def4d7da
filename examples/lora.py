"""LoRA: train small adapters beside frozen weights, on ONNX Runtime, and export the model with them.

:class:`LowRank` adds ``x A B`` to a frozen layer; its backward computes no gradient of the frozen weight.
Run it with ``python examples/lora.py``. It prints:

    loss: eager 1.0331 to 0.7851, ORT 1.0331 to 0.7851
    largest difference of a loss: 1.8e-07
    trained 352 of 1160 numbers; the frozen ones are as before: True
    export: 5e-07 from eager PyTorch
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import torch2ort


class LowRank(torch.autograd.Function):
    """``x W^T + scale * x A B`` with ``W [out, in]``, ``A [in, rank]`` and ``B [rank, out]``."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale = scale
        return x @ weight.T + scale * (x @ a @ b)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b = ctx.saved_tensors
        scaled = ctx.scale * grad
        grad_x = grad @ weight + scaled @ b.T @ a.T
        rows, grads = x.flatten(0, -2), scaled.flatten(0, -2)
        return grad_x, None, rows.T @ (grads @ b.T), (rows @ a).T @ grads, None


class Adapted(nn.Module):
    """A linear layer whose weight is frozen, with an adapter beside it."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(layer.in_features, rank) / rank)
        self.b = nn.Parameter(torch.zeros(rank, layer.out_features))

    def forward(self, x: Tensor) -> Tensor:
        return LowRank.apply(x, self.layer.weight, self.a, self.b, 2.0) + self.layer.bias


def train(module: nn.Module, x: Tensor, target: Tensor) -> list[float]:
    """Return the losses of 20 steps."""
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.02)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (module(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    torch.manual_seed(1)
    model = nn.Sequential(Adapted(nn.Linear(16, 32), 4), nn.GELU(), Adapted(nn.Linear(32, 8), 4))
    frozen = model[0].layer.weight.clone()
    x, target = torch.randn(32, 5, 16), torch.randn(32, 5, 8)
    eager, ort = train(copy.deepcopy(model), x, target), train(torch2ort.ORTModule(model), x, target)
    print(f"loss: eager {eager[0]:.4f} to {eager[-1]:.4f}, ORT {ort[0]:.4f} to {ort[-1]:.4f}")
    print(f"largest difference of a loss: {max(abs(a - b) for a, b in zip(eager, ort, strict=True)):.1e}")
    count = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    same = torch.equal(frozen, model[0].layer.weight)
    print(f"trained {trained} of {count} numbers; the frozen ones are as before: {same}")
    served = torch2ort.export(model.eval(), x)(x)
    print(f"export: {(served - model(x)).abs().max():.0e} from eager PyTorch")
