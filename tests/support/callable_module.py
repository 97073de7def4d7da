"""A model of one layer around a test's function."""

from __future__ import annotations

import torch


class CallableModule(torch.nn.Module):
    """Calls ``call`` with the model and a linear layer's result; ``held`` is an attribute."""

    def __init__(self, call, held=None) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.call = call
        self.held = held

    def forward(self, x):
        return self.call(self, self.linear(x))
