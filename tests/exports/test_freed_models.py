"""An export keeps nothing of its model alive once the model and its results are gone."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import torch2ort
from torch2ort.runtime import version


class Scaled(torch.autograd.Function):
    """Takes a module as an argument, which its site holds."""

    @staticmethod
    def forward(ctx, x, layer):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return Scaled.apply(self.layer(x), self.layer)


def train(model: nn.Module, x: torch.Tensor) -> None:
    torch2ort.ORTModule(model)(x).sum().backward()


def infer(model: nn.Module, x: torch.Tensor) -> None:
    torch2ort.ORTModule(model)(x)


def export(model: nn.Module, x: torch.Tensor) -> None:
    torch2ort.export(model, x)(x)


@pytest.mark.skipif(
    version() < (1, 20),
    reason="onnxruntime-training 1.19.2 keeps a session's kernels, and Functions' arguments",
)
@pytest.mark.parametrize("use", [train, infer, export])
def test_parameters_are_freed_with_their_model(use):
    model = Model()
    freed = [weakref.ref(model), *map(weakref.ref, model.parameters())]
    use(model, torch.randn(2, 4))
    del model
    gc.collect()
    assert [reference() for reference in freed] == [None] * 3
