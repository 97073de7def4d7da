"""The ONNX graph of a model that trains, which is built on first access."""

from __future__ import annotations

import copy

import torch
from torch import nn

import torch2ort
from tests.support.comparison import assert_same


class Replaced(nn.Module):
    """No parameter affects its output, and it overwrites one buffer without reading it."""

    def __init__(self) -> None:
        super().__init__()
        self.unread = nn.Linear(4, 4)
        self.register_buffer("scale", torch.arange(4.0))
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x):
        self.total.copy_(self.scale)
        self.total.add_(x.sum(0))
        return x * self.scale


def test_a_buffer_that_is_replaced_is_eagers_where_no_output_requires_a_gradient():
    model = Replaced()
    module = torch2ort.ORTModule(copy.deepcopy(model))
    for _ in range(2):
        x = torch.randn(3, 4)
        assert_same(module(x), model(x), "output")
        assert_same(module.total, model.total, "buffer")


class Normalized(nn.Module):
    """Updates running statistics by an operator whose schema does not declare the write."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        norm, h = self.norm, self.layer(x)
        statistics = norm.running_mean, norm.running_var
        return torch.native_batch_norm(h, norm.weight, norm.bias, *statistics, True, 0.1, 1e-5)[0]


def test_statistics_that_an_operator_updates_unsaid_are_eagers():
    model = Normalized()
    module = torch2ort.ORTModule(copy.deepcopy(model))
    for _ in range(2):
        x = torch.randn(6, 4)
        assert_same(module(x).detach(), model(x).detach(), "output")
        for name, buffer in model.norm.named_buffers():
            assert_same(dict(module.norm.named_buffers())[name], buffer, name)
