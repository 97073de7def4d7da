"""An LSTM in float32 is oneDNN's layers in a step, as in eager PyTorch; other recurrent nets stay whole."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torch2ort
from torch2ort.options import Options

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="eager PyTorch runs an LSTM otherwise without oneDNN"
)


class Net(nn.Module):
    """An LSTM whose output and last states are results."""

    def __init__(self, **settings) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, **settings)

    def forward(self, x, states=None):
        output, (hidden, cell) = self.lstm(x, states)
        return output * 2.0, hidden, cell


X = torch.randn(5, 7, 8)


def step(
    module: nn.Module, read: tuple[int, ...] = (0, 1, 2), x: torch.Tensor = X
) -> list[torch.Tensor | None]:
    """Results and gradients of a step whose loss reads some of the results."""
    torch.manual_seed(3)
    module.zero_grad()
    x = x.clone().requires_grad_()
    results = module(x)
    sum(results[i].square().sum() for i in read).backward()
    return [*(r.detach() for r in results), x.grad, *(p.grad for p in module.parameters())]


def kernels(module: torch2ort.ORTModule, x: torch.Tensor = X) -> set[str]:
    """Names of PyTorch's kernels that a step runs."""
    step(module, x=x)
    with module.profile(1) as taken:
        step(module, x=x)
    return {row.name.removeprefix("torch.ops.aten.") for row in taken.functions}


LAYERS = {"mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"}
SETTINGS = [
    {},
    {"num_layers": 2, "batch_first": True},
    {"bidirectional": True},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
    {"bias": False, "num_layers": 2},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_step_is_eagers(settings):
    model = Net(**settings)
    module = torch2ort.ORTModule(copy.deepcopy(model))
    for _ in range(2):
        torch.testing.assert_close(step(module), step(model))
    assert kernels(module) >= LAYERS


@pytest.mark.parametrize("read", [(0,), (1,), (2,), (1, 2)])
def test_results_that_no_loss_reads_have_no_gradient(read):
    model = Net(num_layers=2)
    module = torch2ort.ORTModule(copy.deepcopy(model))
    torch.testing.assert_close(step(module, read), step(model, read))


def test_states_get_gradients():
    model = Net(num_layers=2)
    module = torch2ort.ORTModule(copy.deepcopy(model))

    def gradients(net: nn.Module) -> list[torch.Tensor | None]:
        states = tuple(torch.full((2, 7, 16), value).requires_grad_() for value in (0.1, 0.2))
        net(X, states)[0].square().sum().backward()
        return [state.grad for state in states]

    torch.testing.assert_close(gradients(module), gradients(model))


def test_frozen_weights_have_no_gradient():
    model = Net(num_layers=2)
    model.lstm.weight_hh_l0.requires_grad_(False)
    model.lstm.bias_ih_l1.requires_grad_(False)
    module = torch2ort.ORTModule(copy.deepcopy(model))
    torch.testing.assert_close(step(module), step(model))


def test_a_second_backward_gives_the_same_gradients():
    module = torch2ort.ORTModule(Net(num_layers=2))
    loss = module(X)[0].square().sum()
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    loss.backward()
    torch.testing.assert_close([p.grad for p in module.parameters()], first)


def test_a_write_to_a_weight_before_backward_is_refused_as_in_eager():
    for net in (Net(), torch2ort.ORTModule(Net())):
        loss = net(X)[0].square().sum()
        with torch.no_grad():
            next(net.parameters()).add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("read", [(0, 1, 2), (1,)])
def test_graphs_of_the_cache_are_these(read, tmp_path):
    model = Net(num_layers=2)
    options = Options(cache_dir=tmp_path)
    step(torch2ort.ORTModule(copy.deepcopy(model), options=options))
    module = torch2ort.ORTModule(copy.deepcopy(model), options=options)
    torch.testing.assert_close(step(module, read), step(model, read))
    assert module.exported.cache.hit


def test_lengths_and_batches_may_vary():
    model = Net(num_layers=2)
    module = torch2ort.ORTModule(copy.deepcopy(model))
    for shape in [(5, 7, 8), (6, 7, 8), (3, 2, 8), (5, 7, 8)]:
        x = torch.randn(shape)
        torch.testing.assert_close(step(module, x=x), step(model, x=x))


@pytest.mark.parametrize(
    "settings", [{"proj_size": 4}, {"num_layers": 2, "dropout": 0.5}], ids=["projections", "dropout"]
)
def test_other_nets_stay_whole(settings):
    model = Net(**settings)
    module = torch2ort.ORTModule(copy.deepcopy(model))
    torch.testing.assert_close(step(module), step(model))
    assert LAYERS.isdisjoint(kernels(module))


def test_an_lstm_in_double_stays_whole():
    model, x = Net().double(), X.double()
    module = torch2ort.ORTModule(copy.deepcopy(model))
    torch.testing.assert_close(step(module, x=x), step(model, x=x))
    assert LAYERS.isdisjoint(kernels(module, x))


def test_an_lstm_under_autocast_stays_whole():
    model = Net()
    module = torch2ort.ORTModule(copy.deepcopy(model))
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = module(X)[0], model(X)[0]
    torch.testing.assert_close(found, expected)


def test_without_onednn_an_lstm_stays_whole():
    model = Net()
    module = torch2ort.ORTModule(copy.deepcopy(model))
    with torch.backends.mkldnn.flags(enabled=False):
        torch.testing.assert_close(step(module), step(model))
        assert LAYERS.isdisjoint(kernels(module))
