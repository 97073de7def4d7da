"""Modules among a Function's arguments, and those that it runs, are the model's own."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from tests.support.comparison import assert_trains_like_eager


class Runs(Function):
    """Runs the module that it gets."""

    @staticmethod
    def forward(ctx, x, run):
        return run(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


class RunsAll(Function):
    """Runs modules in turn."""

    @staticmethod
    def forward(ctx, x, modules):
        for module in modules:
            x = module(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


class Noting(torch.nn.Module):
    """Sets an attribute of itself in forward."""

    def __init__(self, layer) -> None:
        super().__init__()
        self.layer, self.state = layer, None

    def forward(self, x):
        self.state = torch.get_rng_state()
        return self.layer(x)


class Shared(torch.nn.Module):
    """A model whose layer has two names, so that torch.export traces a proxy of it."""

    def __init__(self, call) -> None:
        super().__init__()
        layer = torch.nn.Linear(4, 4)
        self.blocks, self.plain = torch.nn.ModuleList([Noting(layer)]), torch.nn.ModuleList([layer])
        self.call = call

    def forward(self, x):
        return self.call(self, x)


def closed_over(model, x):
    block = model.blocks[0]
    return Runs.apply(x, lambda h: block(h))


CALLS = {
    "module": lambda model, x: RunsAll.apply(x, model.blocks),
    "list": lambda model, x: RunsAll.apply(x, list(model.blocks)),
    "method": lambda model, x: Runs.apply(x, model.blocks[0].forward),
    "partial": lambda model, x: Runs.apply(x, functools.partial(model.blocks[0])),
    "closure": closed_over,
}


@pytest.mark.parametrize("call", CALLS)
def test_a_module_with_two_names_is_itself_in_a_function(call) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Shared(CALLS[call]))
    assert_trains_like_eager(model, [(torch.randn(2, 4),)], steps=2)


class Tanh(Function):
    """Runs in NumPy, which does not support tensors without data."""

    @staticmethod
    def forward(ctx, x):
        y = torch.from_numpy(np.tanh(x.detach().numpy()))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 - ctx.saved_tensors[0] ** 2)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = torch.nn.Linear(4, 4), torch.nn.Dropout(0.4)

    def forward(self, x):
        return Tanh.apply(self.dropout(self.linear(x)))


class Checkpointed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=True)


def test_a_module_in_a_reentrant_checkpoint_may_run_on_real_tensors_alone() -> None:
    assert_trains_like_eager(Checkpointed(), [(torch.randn(3, 4, requires_grad=True),)], steps=2)
