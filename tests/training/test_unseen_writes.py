"""Backward reads forward's activations, whatever code outside of the graph has written since, undetected."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch2ort
from tests.support.comparison import assert_same
from tests.support.sweeps import sample_cases

WIDTH = 64


class Net(nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.body = body
        self.before, self.norm, self.after = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
        self.scale, self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Parameter(torch.rand(1))
        self.register_buffer("shift", torch.rand(WIDTH))

    def forward(self, x):
        return self.body(self, x)


def attention(m, x):
    h = m.before(x).view(8, -1, 4, 16).transpose(1, 2)
    mixed = (h @ h.transpose(-1, -2) * m.gain).softmax(-1) @ h
    return m.after(mixed.transpose(1, 2).reshape(x.shape))


BODIES = {
    "a scale": lambda m, x: m.after(F.gelu(m.before(x) * m.scale) * m.scale),
    "a view of a scale": lambda m, x: m.after(
        F.gelu(m.before(x) * m.scale.view(1, 1, -1)) * m.scale.view(1, 1, -1)
    ),
    "a buffer": lambda m, x: m.after(torch.tanh(m.before(x) * m.shift) * m.scale),
    "a norm": lambda m, x: m.after(F.gelu(m.norm(m.before(x)))),
    "a norm of an input": lambda m, x: m.after(m.norm(x)),
    "an input": lambda m, x: m.after(F.gelu(x) * m.scale),
    "a large weight": lambda m, x: m.after(x @ torch.exp(m.before.weight)),
    "an output": lambda m, x: (h := m.before(x) * 2, m.after(F.gelu(h))),
    "attention": attention,
}


def by_data(tensor):
    tensor.data.add_(0.5)


def by_numpy(tensor):
    tensor.detach().numpy()[...] += 0.5


WAYS = list(itertools.product(BODIES, (4, 64), (by_data, by_numpy)))


@pytest.mark.parametrize(("name", "length", "write"), sample_cases(WAYS, 3))
def test_gradients_are_eagers_after_a_write_that_nobody_sees(name, length, write):
    torch.manual_seed(0)
    net = Net(BODIES[name])
    x = torch.randn(8, length, WIDTH)
    found = []
    for model in (copy.deepcopy(net), torch2ort.ORTModule(copy.deepcopy(net))):
        given = x.clone().requires_grad_()
        outputs = model(given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = sum(output.square().mean() for output in outputs)
        for tensor in (*model.parameters(), *model.buffers(), given, *outputs):
            write(tensor)
        loss.backward()
        found.append({"x": given.grad, **{name: p.grad for name, p in model.named_parameters()}})
    for name, gradient in found[0].items():
        assert_same(found[1][name], gradient, name)
