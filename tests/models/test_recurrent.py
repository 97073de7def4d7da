"""Recurrent nets over sequences of many lengths, in one graph."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torch2ort
from tests.support.comparison import assert_trains_like_eager


class Net(nn.Module):
    def __init__(self, kind, **settings) -> None:
        super().__init__()
        self.net = kind(6, 8, **settings)

    def forward(self, x):
        return self.net(x)


KINDS = {
    "lstm": (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True, "dropout": 0.2}),
    "lstm with a projection": (nn.LSTM, {"num_layers": 2, "bidirectional": True, "proj_size": 4}),
    "gru": (nn.GRU, {"bidirectional": True, "bias": False}),
    "rnn": (nn.RNN, {}),
    "rnn of relu": (nn.RNN, {"nonlinearity": "relu", "num_layers": 2}),
}
SIZES = ((5, 2), (7, 3), (4, 6), (9, 2))


@pytest.fixture(params=KINDS)
def net(request) -> Net:
    torch.manual_seed(0)
    kind, settings = KINDS[request.param]
    return Net(kind, **settings)


def test_training_takes_two_graphs_for_all_sizes(net):
    batches = [(torch.randn(*size, 6, requires_grad=True),) for size in SIZES]
    module = assert_trains_like_eager(net, batches[:3], lr=0.01, steps=3)
    graph = module.exported
    module(*batches[3])
    assert module.exported is graph


@torch.no_grad()
def test_one_exported_graph_holds_for_all_sizes(net):
    net.eval()
    every = torch.export.Dim.AUTO
    exported = torch2ort.export(net, torch.randn(5, 2, 6), dynamic_shapes=({0: every, 1: every},))
    for size in SIZES:
        x = torch.randn(*size, 6)
        torch.testing.assert_close(exported(x), copy.deepcopy(net)(x), rtol=1e-4, atol=1e-5)
