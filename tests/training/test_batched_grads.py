"""torch.autograd.grad with a batch of gradients, of an ORTModule's outputs."""

from __future__ import annotations

import copy

import torch
from torch import nn

import torch2ort
from tests.support.comparison import assert_same
from tests.support.functions import Square


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.unread = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(2, 2)

    def forward(self, x):
        return self.last(Square.apply(torch.tanh(self.first(x))))


def test_each_of_a_batch_of_gradients_has_its_backward():
    eager = Net()
    model, x, found = torch2ort.ORTModule(copy.deepcopy(eager)), torch.randn(5, 6), []
    for module in (model, eager):
        given, settings = x.clone().requires_grad_(), {"is_grads_batched": True, "allow_unused": True}
        output = module(given)
        wanted, grads = [given, *module.parameters()], torch.eye(15).view(15, 5, 3)
        kept = torch.autograd.grad(output, wanted, grads, retain_graph=True, **settings)
        # Gradients of one column: their batch dimension passes through a transposition.
        last = torch.autograd.grad(output.t()[0], wanted, torch.eye(5), **settings)
        found.append([*kept, *last])
    for ours, eagers in zip(*found, strict=True):
        assert_same(ours, eagers, "gradient")
