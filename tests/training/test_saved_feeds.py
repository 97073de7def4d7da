"""Inputs and weights that a Function saves keep their memory, as in eager PyTorch, without a copy."""

from __future__ import annotations

import copy
import gc
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.autograd import Function

import torch2ort
from torch2ort.pythonop.native import native
from torch2ort.runtime.ortvalues import shares_memory

OPTIONS = torch2ort.Options()
WITH_DLPACK = pytest.mark.skipif(not shares_memory(), reason="this onnxruntime copies its feeds")


class Product(Function):
    """Records the addresses of its arguments, and keeps those that a test selects."""

    addresses: ClassVar[list[tuple[int, int]]] = []
    stashed: ClassVar[list[torch.Tensor]] = []
    stashes = False

    @staticmethod
    def forward(ctx, x, weight):
        Product.addresses.append((x.data_ptr(), weight.data_ptr()))
        if Product.stashes:
            Product.stashed.append(weight)
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, grad * x


class TakesSaved(Function):
    """Its derivative with respect to x is the weight, which backward returns unchanged."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x.sum() + (weight * 0).sum()

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        return weight, weight


class Net(nn.Module):
    def __init__(self, function=Product):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return self.function.apply(x, self.weight).sin().sum()


@pytest.fixture
def notes(monkeypatch):
    """The Function's records of this test alone."""
    monkeypatch.setattr(Product, "addresses", [])
    monkeypatch.setattr(Product, "stashed", [])
    return Product


def trained(net, x, steps=3):
    for _ in range(steps):
        net.zero_grad()
        x.grad = None
        net(x).backward()


@WITH_DLPACK
def test_a_function_saves_the_memory_of_inputs_and_weights(notes):
    net, x = Net(), torch.randn(8, 8, requires_grad=True)
    trained(torch2ort.ORTModule(net, options=OPTIONS), x)
    # The first call gets copies, as it may keep an address.
    assert notes.addresses[-2:] == [(x.data_ptr(), net.weight.data_ptr())] * 2


@pytest.mark.parametrize("function", [Product, TakesSaved])
def test_gradients_are_eagers_and_memory_of_their_own(function, notes):
    net = Net(function)
    eager, x = copy.deepcopy(net), torch.randn(8, 8, requires_grad=True)
    trained(torch2ort.ORTModule(net, options=OPTIONS), x)
    by_ort = x.grad
    trained(eager, x)
    torch.testing.assert_close(by_ort, x.grad)
    torch.testing.assert_close(net.weight.grad, eager.weight.grad)
    assert len({t.data_ptr() for t in (by_ort, net.weight.grad, net.weight)}) == 3


def test_an_input_that_nobody_else_has_lives_until_backward(notes):
    net = Net()
    module = torch2ort.ORTModule(net, options=OPTIONS)
    trained(module, torch.randn(8, 8, requires_grad=True))
    x = torch.randn(8, 8)
    expected = (x * (x * net.weight).cos()).detach()
    net.zero_grad()
    loss = module(x)
    del x
    gc.collect()
    _others = [torch.full((8, 8), torch.nan) for _ in range(100)]
    loss.backward()
    torch.testing.assert_close(net.weight.grad, expected)


def test_a_write_to_a_saved_weight_is_eagers_error(notes):
    net = Net()
    module = torch2ort.ORTModule(net, options=OPTIONS)
    trained(module, torch.randn(8, 8, requires_grad=True))
    loss = module(torch.randn(8, 8))
    with torch.no_grad():
        net.weight.mul_(2)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        loss.backward()


def test_other_memory_in_a_saved_weight_is_refused(notes):
    net = Net()
    module = torch2ort.ORTModule(net, options=OPTIONS)
    trained(module, torch.randn(8, 8, requires_grad=True))
    loss = module(torch.randn(8, 8))
    net.weight.data = torch.zeros(8, 8)
    with pytest.raises(torch2ort.EngineError, match="lies in other memory than in forward"):
        loss.backward()


@WITH_DLPACK
def test_what_a_function_keeps_for_itself_follows_the_weight_as_in_eager(notes, monkeypatch):
    net, x = Net(), torch.randn(8, 8, requires_grad=True)
    module = torch2ort.ORTModule(net, options=OPTIONS)
    monkeypatch.setattr(notes, "stashes", True)
    trained(module, x)
    with torch.no_grad():
        net.weight.fill_(3)
    kept = notes.stashed[-1]
    assert torch.equal(kept, net.weight)
    net.weight = nn.Parameter(torch.zeros(8, 8))
    gc.collect()
    assert torch.equal(kept, torch.full((8, 8), 3.0))


def test_an_input_in_another_order_of_memory_is_given_as_it_is(notes):
    net, x = Net(), torch.randn(8, 8).t().requires_grad_()
    eager = copy.deepcopy(net)
    trained(torch2ort.ORTModule(net, options=OPTIONS), x)
    assert notes.addresses[-1][0] == x.data_ptr()
    trained(eager, x)
    torch.testing.assert_close(net.weight.grad, eager.weight.grad)


def test_two_forwards_before_a_backward_keep_their_own_inputs(notes):
    net = Net()
    eager = copy.deepcopy(net)
    module = torch2ort.ORTModule(net, options=OPTIONS)
    inputs = [torch.randn(8, 8) for _ in range(3)]
    trained(module, inputs[0])
    for model in (module, eager):
        model.zero_grad()
        sum([model(x) for x in inputs]).backward()
    torch.testing.assert_close(net.weight.grad, eager.weight.grad)


class ByNumpy(Function):
    """Keeps its arguments as arrays alone."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.arrays = x.numpy(), weight.numpy()
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = (torch.from_numpy(array) for array in ctx.arrays)
        return grad * weight, grad * x


def test_inputs_in_different_orders_of_memory_in_turn():
    net = Net(ByNumpy)
    eager = copy.deepcopy(net)
    module = torch2ort.ORTModule(net, options=OPTIONS)
    for step in range(6):
        x = torch.randn(8, 8)
        losses = [model(x.t() if step % 2 else x) for model in (module, eager)]
        _others = [torch.full((8, 8), torch.nan) for _ in range(100)]
        sum(losses).backward()
    torch.testing.assert_close(net.weight.grad, eager.weight.grad)


def test_a_run_is_fed_with_tensors():
    with pytest.raises(TypeError, match=r"^feed\(\) takes tensors, not int$"):
        native.Run().feed([1])
