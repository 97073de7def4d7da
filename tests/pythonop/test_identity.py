"""Which tensors are one: what a Function returns, and what becomes of it, as in eager PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.autograd import Function

import torch2ort

WAYS = ["ORTModule", "torch.compile"]


def trained(way: str, model: torch.nn.Module) -> torch.nn.Module:
    """``model`` on ONNX Runtime, its Functions as calls of their own."""
    if way == "ORTModule":
        return torch2ort.ORTModule(model)
    torch.compiler.reset()
    return torch.compile(model, backend="torch2ort", options={"keep_functions": True})


def assert_trains_alike(model: torch.nn.Module, way: str, steps: int = 2) -> None:
    """Compare gradients and buffers after some backwards, which add up, with eager PyTorch's."""
    twin, x = copy.deepcopy(model), torch.randn(2, 4)
    module = trained(way, model)
    for _ in range(steps):
        module(x).square().sum().backward()
        twin(x).square().sum().backward()
    expected = dict(twin.named_buffers()) | {name: p.grad for name, p in twin.named_parameters()}
    actual = dict(model.named_buffers()) | {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close(actual, expected)


class Calling(torch.nn.Module):
    """``call`` of what a linear layer gives."""

    def __init__(self, call) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.call = call

    def forward(self, x):
        return self.call(self, self.linear(x))


class Twice(Function):
    """Returns one tensor in the first and the last place."""

    @staticmethod
    def forward(ctx, x):
        y = x * 2
        return y, x * 3, y

    @staticmethod
    def backward(ctx, first, other, last):
        return first * 2 + other * 3 + last * 5


def read_both(model, h):
    first, other, last = Twice.apply(h)
    return first.relu() + other + 2 * last.relu()


def written(model, h):
    first, _, last = Twice.apply(h)
    first.mul_(3)
    return last.sigmoid()


def compared(model, h):
    first, other, last = Twice.apply(h)
    return first if first is last and first is not other else first * 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", [read_both, written, compared])
def test_a_tensor_that_is_returned_twice_is_one_tensor(call, way) -> None:
    assert_trains_alike(Calling(call), way)


class SometimesTwice(Function):
    """Returns one tensor twice for small numbers, and a copy for large ones."""

    @staticmethod
    def forward(ctx, x):
        y = x * 2
        return y, y.clone() if x.sum() > 1e3 else y

    @staticmethod
    def backward(ctx, first, last):
        return first * 2 + last * 3


def test_a_run_that_returns_two_tensors_in_place_of_one_is_refused() -> None:
    model = Calling(lambda model, h: sum(SometimesTwice.apply(h)))
    torch.nn.init.eye_(model.linear.weight)
    module = torch2ort.ORTModule(model)
    module(torch.zeros(2, 4))
    message = (
        f"{SometimesTwice.__module__}.SometimesTwice: forward returns two tensors as outputs 0 and 1, but "
        "returned one tensor for both when it was exported, of which the last output gets the gradient. "
        "Return output 0 as a clone() always"
    )
    with pytest.raises(torch2ort.EngineError) as raised:
        module(torch.full((2, 4), 1e3))
    assert str(raised.value) == message
