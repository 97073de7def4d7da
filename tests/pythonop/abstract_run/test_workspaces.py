"""Memory that a Function reuses: results in that memory keep their values in the graph."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.autograd import Function

import torch2ort
from tests.support.comparison import assert_same
from tests.support.sweeps import sample_cases

RETURNED = {
    "the tensor": lambda kept, like: kept,
    "a view": lambda kept, like: kept.view_as(like),
    "detached": lambda kept, like: kept.detach(),
    "data": lambda kept, like: kept.data,
    "over numpy's memory": lambda kept, like: torch.from_numpy(kept.numpy()),
    "its own memory": lambda kept, like: kept.clone(),
}


def make(returned, *, forward=False):
    """A Function that triples in forward and doubles in backward, by a tensor that a closure keeps."""
    kept = {}

    def scaled(x, factor, keep):
        if not keep:
            return x * factor
        memory = kept.setdefault((tuple(x.shape), factor), torch.empty(x.shape))
        torch.mul(x, factor, out=memory)
        return returned(memory, x)

    class Workspace(Function):
        @staticmethod
        def forward(ctx, x):
            return scaled(x, 3, forward)

        @staticmethod
        def backward(ctx, grad):
            return scaled(grad, 2, not forward)

    return Workspace, kept


class Model(torch.nn.Module):
    """Two parameters behind ``call``."""

    def __init__(self, call) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.randn(3, 4))
        self.second = torch.nn.Parameter(torch.randn(3, 4))
        self.call = call

    def forward(self, x):
        return self.call(self.first, self.second, x)


def both(f):
    return lambda a, b, x: f(a) * x + f(b) * (x + 1)


def rows(f):
    return lambda a, b, x: f(f(a)).tanh() * x + f(f(f(b)))


def one_twice(f):
    return lambda a, b, x: f(a) * x + f(a).tanh() * b


class Fresh(Function):
    """The computation of a Workspace, without reuse of memory."""

    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@pytest.mark.parametrize("returned", sample_cases(RETURNED.values(), 2), ids=RETURNED)
@pytest.mark.parametrize("calls", [both, rows])
def test_gradients_keep_their_numbers(calls, returned):
    function, kept = make(returned)
    assert_like_fresh(calls, function, kept)


@pytest.mark.parametrize("calls", [both, rows, one_twice])
@pytest.mark.parametrize("name", ["the tensor", "detached"])
def test_outputs_keep_their_numbers(calls, name):
    function, kept = make(RETURNED[name], forward=True)
    # A second run of such a forward is refused.
    assert_like_fresh(calls, function, kept, retain=False)


def assert_like_fresh(calls, function, kept, *, retain=True):
    model = Model(calls(Fresh.apply))
    wrapped = torch2ort.ORTModule(Model(calls(function.apply)))
    wrapped.load_state_dict(model.state_dict())
    for step in range(2):
        x = torch.randn(3, 4)
        outputs = []
        for module in (model, wrapped):
            module.zero_grad()
            outputs.append(module(x))
            (outputs[-1] * x).sum().backward(retain_graph=retain and step == 1)
            if retain and step == 1:
                (outputs[-1] * x).sum().backward()
        for memory in kept.values():
            memory.fill_(float("nan"))
        assert_same(outputs[1], outputs[0], f"step {step}")
        for (name, e), (_, a) in zip(model.named_parameters(), wrapped.named_parameters(), strict=True):
            assert_same(a.grad, e.grad, f"step {step}, {name}")


def test_an_output_of_the_model_is_no_workspace():
    function, _ = make(RETURNED["the tensor"], forward=True)
    wrapped = torch2ort.ORTModule(Model(lambda a, b, x: function.apply(a + x)))
    first = wrapped(torch.zeros(3, 4))
    before = first.detach().clone()
    wrapped(torch.ones(3, 4))
    assert torch.equal(first, before)


def test_a_parameter_keeps_its_gradient_for_itself():
    function, kept = make(RETURNED["the tensor"])
    wrapped = torch2ort.ORTModule(Model(both(function.apply)))
    wrapped(torch.randn(3, 4)).sum().backward()
    gradients = [p.grad.untyped_storage().data_ptr() for p in wrapped.parameters()]
    (memory,) = kept.values()
    assert memory.untyped_storage().data_ptr() not in gradients
    assert len(set(gradients)) == 2


def test_a_saved_output_is_not_copied():
    seen = []

    class Saves(Function):
        @staticmethod
        def forward(ctx, x):
            y = x.exp()
            ctx.save_for_backward(y)
            ctx.half = y[:2]
            seen.append(y.data_ptr())
            return y

        @staticmethod
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            seen.append(y.data_ptr())
            return grad * y

    class Reads(Fresh):
        @staticmethod
        def forward(ctx, x):
            seen.append(x.data_ptr())
            return x * 3, x.sum()

        @staticmethod
        def backward(ctx, grad, _):
            return grad * 2

    model = Model(lambda a, b, x: Reads.apply(torch.neg(Saves.apply(a)) + Saves.apply(b) + x)[0])
    wrapped = torch2ort.ORTModule(copy.deepcopy(model))
    for _ in range(2):
        seen.clear()
        wrapped(torch.randn(3, 4)).sum().backward()
    assert sorted(seen[:2]) == sorted(seen[3:])
