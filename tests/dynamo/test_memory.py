"""A step through torch.compile leaves no memory allocated behind it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.functions import Square
from tests.support.memory import bytes_left_by

pytestmark = [
    # Thousands of steps, on a machine that is shared.
    pytest.mark.timeout(900),
]

# Above the error of a measurement, and below the size of a tensor.
NOTHING = 128


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8)

    def forward(self, x):
        return self.lstm(x)[0]


MODELS = {
    "linear": (lambda: nn.Linear(8, 4), {}),
    "function": (lambda: lambda x: Square.apply(x * 2), {}),
    "kept function": (lambda: lambda x: Square.apply(x * 2), {"keep_functions": True}),
    "product": (lambda: lambda x: (x + 2).prod(-1), {}),
    "product of a parameter": (lambda: nn.Sequential(nn.Linear(8, 4), nn.Flatten(0)).append(Product()), {}),
    "lstm": (Recurrent, {}),
    "autocast": (lambda: Autocast(), {}),
}


class Product(nn.Module):
    def forward(self, x):
        return x.prod()


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4))

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.layers(x).prod(-1)


@pytest.mark.parametrize(
    "name", [n if n == "kept function" else pytest.param(n, marks=pytest.mark.long) for n in MODELS]
)
def test_a_step_leaves_no_memory_behind(name: str) -> None:
    torch.compiler.reset()
    make, options = MODELS[name]
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(make(), backend="torch2ort", options=options)

        def step() -> None:
            compiled(torch.ones(5, 8, requires_grad=True)).sum().backward()

        assert bytes_left_by(step) < NOTHING
