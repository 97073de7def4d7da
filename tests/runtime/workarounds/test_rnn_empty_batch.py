"""A recurrent net accepts an empty batch, as in eager PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch2ort
from tests.support.comparison import assert_same

NETS = {
    "lstm": nn.LSTM(4, 3),
    "lstm of two layers, both ways": nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True),
    "gru": nn.GRU(4, 3, batch_first=True),
    "gru both ways": nn.GRU(4, 3, bidirectional=True),
    "rnn": nn.RNN(4, 3),
}


@pytest.fixture(params=NETS)
def net(request) -> nn.RNNBase:
    return NETS[request.param]


def batch(net: nn.RNNBase, size: int, steps: int = 5) -> torch.Tensor:
    return torch.randn(size, steps, 4) if net.batch_first else torch.randn(steps, size, 4)


@torch.no_grad()
@pytest.mark.parametrize(
    "sizes", [(0,), pytest.param((2, 0, 3), marks=pytest.mark.long), (2, 3, 0, 0)], ids=str
)
def test_a_batch_of_nothing_runs_among_others(net, sizes):
    module = torch2ort.ORTModule(net)
    for size in sizes:
        x = batch(net, size)
        assert_same(module(x), net(x), "output")


@torch.no_grad()
def test_initial_states_of_nothing_are_taken(net):
    of_lstm = isinstance(net, nn.LSTM)
    state = torch.zeros((1 + net.bidirectional) * net.num_layers, 0, 3)
    states = (state, state.clone()) if of_lstm else state
    x = batch(net, 0)
    assert_same(torch2ort.ORTModule(net)(x, states), net(x, states), "output")


@torch.no_grad()
def test_an_exported_net_takes_a_batch_of_nothing(net):
    sample = batch(net, 0)
    exported = torch2ort.export(net.eval(), sample)
    assert_same(exported(sample), net(sample), "output")


def test_a_batch_of_nothing_is_trained_on(net):
    module = torch2ort.ORTModule(net)
    x = batch(net, 0).requires_grad_()
    module(x)[0].sum().backward()
    found = [p.grad for p in net.parameters()]
    net.zero_grad()
    net(x)[0].sum().backward()
    for mine, eagers in zip(found, [p.grad for p in net.parameters()], strict=True):
        assert_same(mine, eagers, "gradient")
