"""Activations are freed while backward runs, each as soon as eager frees it."""

from __future__ import annotations

import copy
from typing import ClassVar

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import torch2ort

pytestmark = pytest.mark.ort_training("it is what is tried")


class Traced(torch.autograd.Function):
    """Doubles; notes in each backward which of its outputs are still in memory."""

    made: ClassVar[dict[int, StorageWeakRef]] = {}
    seen: ClassVar[list[tuple[int, list[int]]]] = []

    @staticmethod
    def forward(ctx, x, number):
        ctx.number = number
        result = x * 2
        # An export may call it on tensors without memory.
        if type(x) is torch.Tensor:
            Traced.made[number] = StorageWeakRef(result.untyped_storage())
        return result

    @staticmethod
    def backward(ctx, grad):
        held = [number for number, storage in Traced.made.items() if not storage.expired()]
        Traced.seen.append((ctx.number, sorted(held)))
        return grad * 2, None


class Chain(torch.nn.Module):
    """Linear layers, whose weights' gradients read what the layer before returned."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(6)])

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = layer(Traced.apply(x, number) if number else x)
        return x


class Attention(torch.nn.Module):
    """Blocks with branches, each of them with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            [torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(3)]) for _ in range(4)]
        )

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            hidden = Traced.apply(x, number)
            query, key, value = (layer(hidden) for layer in block)
            x = x + torch.softmax(query @ key.transpose(-1, -2), -1) @ value
        return x


def held_in_backward(module, x):
    module(x).square().mean().backward()
    Traced.seen.clear()
    module(x).square().mean().backward()
    return list(Traced.seen)


@pytest.mark.parametrize("model", [Chain, Attention])
def test_backward_frees_each_output_as_early_as_eager(model):
    eager = model()
    x = torch.randn(8, 16)
    expected = held_in_backward(copy.deepcopy(eager), x)
    assert len(expected) > 2
    assert held_in_backward(torch2ort.ORTModule(eager), x) == expected
