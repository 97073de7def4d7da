"""Large activations and normalizations train in PyTorch's own kernels, with eager's results."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.comparison import assert_trains_like_eager
from tests.support.functions import Square
from tests.support.sweeps import sample_cases
from torch2ort.symbolics.backward_decompositions import LARGE

nn = torch.nn
SIDE = math.isqrt(LARGE) + 1

MODULES = {
    "celu": nn.CELU(0.7),
    "elu": nn.ELU(0.5),
    "gelu": nn.GELU(),
    "gelu by tanh": nn.GELU(approximate="tanh"),
    "group norm": nn.GroupNorm(1, SIDE),
    "group norm without weight": nn.GroupNorm(1, SIDE, affine=False),
    "hard sigmoid": nn.Hardsigmoid(),
    "hard swish": nn.Hardswish(),
    "hard tanh": nn.Hardtanh(-0.4, 0.3),
    "layer norm": nn.LayerNorm(SIDE),
    "layer norm without bias": nn.LayerNorm(SIDE, bias=False),
    "layer norm without weight": nn.LayerNorm(SIDE, elementwise_affine=False),
    "leaky relu": nn.LeakyReLU(0.2),
    "mish": nn.Mish(),
    "relu": nn.ReLU(),
    "selu": nn.SELU(),
    "silu": nn.SiLU(),
    "softplus": nn.Softplus(2, 5),
}


class Model(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.first = nn.Linear(8, SIDE)
        self.module = module

    def forward(self, x):
        return Square.apply(self.module(self.first(x)))


@pytest.mark.parametrize("module", sample_cases(MODULES.values(), 3), ids=MODULES)
def test_a_large_tensor_trains_like_eager(module):
    torch.manual_seed(0)
    batches = [(torch.randn(rows, 8, requires_grad=True),) for rows in (SIDE, SIDE + 3)]
    assert_trains_like_eager(Model(module), batches, steps=4)
