"""Exceptions that the model's own code catches, to continue differently, end in an error that says so."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
from torch.autograd import Function

import torch2ort

WAY_OUT = (
    "A graph has one way for all inputs, that of its sample. Catch the exception inside of a "
    "torch.autograd.Function, or decide by torch.where"
)


class Root(Function):
    """Raises for numbers below zero."""

    @staticmethod
    def forward(ctx, x):
        if (x.detach() < 0).any():
            raise ArithmeticError("a number below zero")
        return x.sqrt()

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def caught(x):
    try:
        return Root.apply(x)
    except (KeyError, ArithmeticError):
        return x * 5


def suppressed(x):
    with contextlib.suppress(ArithmeticError):
        return Root.apply(x)
    return x * 5


def caught_above(x):
    try:
        return Root.apply(x)
    except Exception:
        return x * 5


def raised_again(x):
    try:
        return Root.apply(x)
    except ArithmeticError:
        x = x * 5
        raise


def of_another_kind(x):
    try:
        return Root.apply(x)
    except KeyError:
        return x * 5


def in_the_handler(x):
    try:
        raise KeyError
    except KeyError:
        return Root.apply(x)


class Model(torch.nn.Module):
    def __init__(self, call) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.call = call

    def forward(self, x):
        return self.call(x * self.weight)


def kept(model):
    torch.compiler.reset()
    return torch.compile(model, backend="torch2ort", options={"keep_functions": True})


@pytest.mark.parametrize("call", [caught, suppressed, caught_above])
def test_an_exception_that_the_model_catches_is_named(call) -> None:
    module = torch2ort.ORTModule(Model(call))
    module(torch.ones(2, 3))
    message = (
        rf"{__name__}\.Root\.forward raised ArithmeticError \(a number below zero\), which the model's code "
        rf"catches at test_caught_exceptions\.py:\d+\. {re.escape(WAY_OUT)}"
    )
    with pytest.raises(torch2ort.EngineError, match=f"^{message}$") as raised:
        module(-torch.ones(2, 3))
    assert isinstance(raised.value.__cause__, ArithmeticError)


def test_in_a_graph_of_dynamos_it_is_named() -> None:
    module = kept(Model(caught))
    module(torch.ones(2, 3))
    with pytest.raises(
        torch2ort.EngineError, match=r"which the model's code catches at test_caught_exceptions\.py:\d+\. "
    ):
        module(-torch.ones(2, 3))


@pytest.mark.parametrize("call", [raised_again, of_another_kind, in_the_handler])
def test_an_exception_that_reaches_the_caller_is_the_same(call) -> None:
    module = torch2ort.ORTModule(Model(call))
    module(torch.ones(2, 3))
    with pytest.raises(ArithmeticError, match=r"^a number below zero$"):
        module(-torch.ones(2, 3))


def test_one_that_is_caught_on_the_sample_is_refused() -> None:
    message = (
        f"{__name__}.Root.forward raised ArithmeticError (a number below zero) on the sample, and the "
        f"model's code catches it. {WAY_OUT}"
    )
    with pytest.raises(torch2ort.ExportError, match=f"^{re.escape(message)}$") as raised:
        torch2ort.ORTModule(Model(caught))(-torch.ones(2, 3))
    assert isinstance(raised.value.__cause__, ArithmeticError)


class Inverted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(3))

    def forward(self, x):
        try:
            return torch.linalg.inv(x @ self.weight)
        except RuntimeError:
            return torch.linalg.pinv(x @ self.weight)


def test_what_an_operator_raises_is_named_where_the_model_catches_it() -> None:
    module = torch2ort.ORTModule(Inverted())
    module(torch.eye(3))
    message = (
        r"^an operator raised _LinAlgError \(.*\), which the model's code catches at "
        r"test_caught_exceptions\.py:\d+\. "
    )
    with pytest.raises(torch2ort.EngineError, match=message):
        module(torch.ones(3, 3))
