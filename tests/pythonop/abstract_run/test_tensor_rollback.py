"""Writes of a Function to tensors that are not its arguments happen in calls, and not in an export."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import torch2ort

ARRAY = np.ones(2, np.float32)
GLOBAL = torch.from_numpy(ARRAY)
LISTED = [torch.ones(2)]


def halves(t):
    t.mul_(0.5)


def halves_its_data(t):
    t.data.mul_(0.5)


def sets_its_data(t):
    t.data = t.data * 0.5


def sets(t):
    t.set_(t * 0.5)


def grows(t):
    t.resize_(t.numel() + 1).fill_(0.5)


def gives_out(t):
    torch.mul(t, 0.5, out=t)


def writes_by_numpy(t):
    t.numpy()[...] *= 0.5


def reads_a_value_later(t):
    t.mul_(0.5)
    if t.sum().item() > 100:
        raise AssertionError


WAYS = (
    halves,
    halves_its_data,
    sets_its_data,
    sets,
    grows,
    gives_out,
    writes_by_numpy,
    reads_a_value_later,
)


def writing(held, write):
    """A Function whose forward reads and writes the tensor that ``held`` returns."""

    class Writes(torch.autograd.Function):
        scale = torch.ones(2)

        @staticmethod
        def forward(ctx, x):
            tensor = held(Writes)
            write(tensor)
            return x * tensor.sum()

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    return Writes


class Model(torch.nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.function = function

    def forward(self, x):
        return self.function.apply(self.linear(x))


X = torch.randn(3, 4)


def steps(module, tensor):
    """Results of two steps, and the tensor's value after each; the tensor is restored afterwards."""
    before, values = tensor.detach(), tensor.clone()
    seen = []
    for _ in range(2):
        module.zero_grad()
        y = module(X)
        y.sum().backward()
        seen += [y.detach(), module.linear.weight.grad.clone(), tensor.clone()]
    tensor.data = before
    tensor.copy_(values)
    return seen


def is_as_eager(function, tensor, **options):
    model = Model(function)
    expected = steps(model, tensor)
    module = torch2ort.ORTModule(model, options=torch2ort.Options(**options))
    torch.testing.assert_close(steps(module, tensor), expected)


@pytest.mark.parametrize("write", WAYS, ids=lambda w: w.__name__)
def test_a_class_attribute_is_written_to_once_a_call(write):
    function = writing(lambda cls: cls.scale, write)
    is_as_eager(function, function.scale)


@pytest.mark.parametrize("write", [halves, sets_its_data, writes_by_numpy], ids=lambda w: w.__name__)
@pytest.mark.parametrize("place", ["global", "closure", "list"])
def test_so_is_what_is_held_elsewhere(place, write):
    local = torch.ones(2)
    held = {"global": lambda _: GLOBAL, "closure": lambda _: local, "list": lambda _: LISTED[0]}[place]
    is_as_eager(writing(held, write), held(None))


def test_so_is_a_view_of_it_and_an_array_that_shares_its_memory():
    is_as_eager(writing(lambda _: GLOBAL[1:], halves), GLOBAL)
    np.testing.assert_array_equal(ARRAY, np.ones(2, np.float32))


def test_an_export_leaves_it_as_it_was():
    function = writing(lambda cls: cls.scale, halves)
    torch2ort.export(Model(function).eval(), X)
    torch.testing.assert_close(function.scale, torch.ones(2))


def test_so_does_an_export_that_fails():
    def fails(tensor):
        tensor.mul_(0.5)
        raise ValueError("never runs")

    function = writing(lambda cls: cls.scale, fails)
    with pytest.raises(ValueError, match=r"^never runs$"):
        torch2ort.export(Model(function).eval(), X)
    torch.testing.assert_close(function.scale, torch.ones(2))


class InBackward(torch.autograd.Function):
    scale = torch.ones(2)
    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        InBackward.scale.mul_(0.5)
        InBackward.calls += 1
        return grad * InBackward.scale.sum() * torch.rand(()) * random.random() * InBackward.calls


def test_verification_writes_no_more():
    function = writing(lambda cls: cls.scale, halves)
    is_as_eager(function, function.scale, verify=True)


def test_verification_of_backward_leaves_nothing_either():
    seen = []
    for options in ({}, {"verify": True}):
        InBackward.calls = 0
        torch.manual_seed(3)
        random.seed(3)
        module = torch2ort.ORTModule(Model(InBackward), options=torch2ort.Options(**options))
        seen.append([*steps(module, InBackward.scale), InBackward.calls, torch.rand(()), random.random()])
    torch.testing.assert_close(*seen)


def test_a_shape_inferer_writes_nothing():
    function = writing(lambda cls: cls.scale, halves)

    @torch2ort.register_shape_inferer(function)
    def infer(node, shapes, dtypes):
        function.scale.mul_(3.0)
        return shapes, dtypes

    try:
        is_as_eager(function, function.scale)
    finally:
        torch2ort.unregister(function)
