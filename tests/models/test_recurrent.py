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


def test_a_weight_written_between_forward_and_backward_raises_as_in_eager(net):
    loss = torch2ort.ORTModule(net)(torch.randn(5, 2, 6, requires_grad=True))[0].sum()
    with torch.no_grad():
        net.net.weight_hh_l0.mul_(2)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        loss.backward()


def test_a_graph_that_is_retained_gives_the_same_gradients_twice(net):
    net.eval()
    module, x = torch2ort.ORTModule(net), torch.randn(5, 2, 6, requires_grad=True)
    loss = module(x)[0].square().sum()
    found = [torch.autograd.grad(loss, [x, *net.parameters()], retain_graph=True) for _ in range(2)]
    expected = torch.autograd.grad(copy.deepcopy(net)(x)[0].square().sum(), [x])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    torch.testing.assert_close(found[0][0], expected[0], rtol=1e-4, atol=1e-5)
