"""Queries of forward about its arguments' metadata: the same result in every layout, or a refusal by name."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch.autograd import Function

import torch2ort
from tests.support.comparison import assert_trains_like_eager
from tests.support.sweeps import sample_cases


class Asks(Function):
    """Multiplies by the result of a query about the argument."""

    @staticmethod
    def forward(ctx, x, question):
        return question(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


class Model(torch.nn.Module):
    def __init__(self, question, laid_out):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.question, self.laid_out = question, laid_out

    def forward(self, x):
        return Asks.apply(self.laid_out(self.linear(x)), self.question)


def transposed(x):
    return x.t()


def sliced(x):
    return x[:, 1:]


def spread(x):
    return x[:, :1].expand(-1, 4)


SAME_EITHER_WAY = {
    "made contiguous": lambda x: (x if x.is_contiguous() else x.contiguous()) * 2,
    "strides as numbers": lambda x: x * len(x.stride()),
    "numpy": lambda x: torch.from_numpy(np.tanh(x.detach().numpy())),
    "pointer": lambda x: x * (x.data_ptr() % 4 + 1),
    "strided as it is": lambda x: x.as_strided(x.shape, x.stride(), x.storage_offset()) * 2,
}
OTHERWISE = {
    "contiguous": lambda x: x * (2 if x.is_contiguous() else 3),
    "stride": lambda x: x * (x.stride(0) * x.stride(1) / 4),
    "strided": lambda x: x * x.as_strided((1,), (1,), 2),
    "numpy": lambda x: x * (sum(x.detach().numpy().strides) / 20),
}


@pytest.mark.parametrize("laid_out", sample_cases([transposed, sliced, spread], 3))
@pytest.mark.parametrize("question", SAME_EITHER_WAY)
def test_a_forward_that_computes_the_same_for_contiguous_arguments_trains(question, laid_out) -> None:
    assert_trains_like_eager(Model(SAME_EITHER_WAY[question], laid_out), [(torch.randn(3, 4),)])


@pytest.mark.parametrize("laid_out", [transposed, sliced])
@pytest.mark.parametrize("question", OTHERWISE)
def test_a_forward_that_computes_something_else_for_them_is_refused(question, laid_out) -> None:
    module = torch2ort.ORTModule(Model(OTHERWISE[question], laid_out))
    expected = (
        f"{Asks.__module__}.Asks: forward reads the memory layout of its arguments and computes other values "
        f"for contiguous ones, and in a graph all are contiguous. Call .contiguous() on them before apply, "
        f"or make forward compute the same for both"
    )
    with pytest.raises(torch2ort.ExportError, match=re.escape(expected)):
        module(torch.randn(3, 4))


@pytest.mark.parametrize("question", OTHERWISE)
def test_for_contiguous_arguments_it_trains(question) -> None:
    assert_trains_like_eager(Model(OTHERWISE[question], torch.tanh), [(torch.randn(3, 4),)])


HISTORY = {
    "is_leaf": lambda x: x * (2 if x.is_leaf else 3),
    "grad_fn": lambda x: x * (2 if x.grad_fn is None else 3),
    "_base": lambda x: x * (2 if x._base is None else 3),
}


@pytest.mark.parametrize("name", HISTORY)
def test_a_forward_that_asks_where_an_argument_comes_from_is_refused(name) -> None:
    module = torch2ort.ORTModule(Model(HISTORY[name], transposed))
    expected = (
        f"{Asks.__module__}.Asks: forward asks for {name} of argument 0, which in a graph has no history: "
        f"each run would answer as for a leaf that is not a view. Read it before apply, and pass the answer "
        f"as an argument"
    )
    with pytest.raises(torch2ort.ExportError, match=re.escape(expected)):
        module(torch.randn(3, 4))


@pytest.mark.parametrize("name", ["is_leaf", "grad_fn"])
def test_of_an_argument_without_a_gradient_it_may_ask(name) -> None:
    model = Model(HISTORY[name], lambda x: x)
    model.linear.requires_grad_(False)
    with torch.no_grad():
        x = torch.randn(3, 4)
        torch.testing.assert_close(torch2ort.ORTModule(model)(x), model(x))
