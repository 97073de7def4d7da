"""PyTorch's own tools in training loops: averages of weights, and functional calls."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.func import functional_call, grad
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import torch2ort
from tests.loops.models import Classifier, ran_on_onnx_runtime


def averaged(model):
    """Train five steps beside a moving average of the weights, which runs as a model of its own."""
    torch.manual_seed(0)
    data = [torch.randn(4, 4) for _ in range(5)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for x in data:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)
    update_bn(data, average)
    return average.eval()(data[0]), average.state_dict()


def test_a_moving_average_of_weights():
    eager = torch.nn.Sequential(Classifier(), torch.nn.BatchNorm1d(2))
    output, state = averaged(torch2ort.ORTModule(copy.deepcopy(eager)))
    assert ran_on_onnx_runtime(output)
    torch.testing.assert_close((output, state), averaged(eager), rtol=1e-4, atol=1e-5)


def test_gradients_of_a_functional_call_by_torch_func_are_refused():
    module = torch2ort.ORTModule(torch.nn.Linear(4, 2))
    weights = dict(module.named_parameters())
    x = torch.randn(3, 4)

    def loss(weights):
        return functional_call(module, weights, (x,)).square().mean()

    with pytest.raises(torch2ort.ExportError, match=r"^ORTModule was called inside a torch.func transform"):
        grad(loss)(weights)
    # torch.autograd gives them.
    found = torch.autograd.grad(loss(weights), list(weights.values()))
    expected = grad(lambda w: functional_call(module.module, w, (x,)).square().mean())(weights)
    torch.testing.assert_close(dict(zip(weights, found, strict=True)), expected)
