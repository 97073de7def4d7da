"""Arguments of kept Functions that are not tensors have the same type and value as in eager PyTorch."""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from tests.support.comparison import assert_same
from torch2ort.errors import ExportError


class Activated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, activation):
        return activation(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


class Told(torch.autograd.Function):
    """Its result depends on the type of its argument."""

    @staticmethod
    def forward(ctx, x, value):
        return x * sum(map(ord, f"{type(value)} {value}"))

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


class Level(enum.IntEnum):
    LOW, HIGH = 1, 2


class Kind(enum.Enum):
    LOW, HIGH = 1, 2


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Settings:
    scale: Any


def times(number):
    return lambda x: x * number


def squared(x):
    return x * x


@pytest.fixture(autouse=True)
def _afresh() -> None:
    torch.compiler.reset()


def kept(function, *, fullgraph=True):
    return torch.compile(function, backend="torch2ort", fullgraph=fullgraph, options={"keep_functions": True})


def results(function, *others):
    x = torch.linspace(-1, 1, 4).requires_grad_()
    output = function(x, *others)
    output.square().sum().backward()
    return output, x.grad


FUNCTIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "sin": torch.sin,
    "method": torch.Tensor.exp,
    "operator": torch.ops.aten.sin.default,
    "own": squared,
    "builtin": abs,
    "partial": functools.partial(torch.mul, other=3),
    "closure": times(3),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_arguments(name: str) -> None:
    activation = FUNCTIONS[name]

    def function(x):
        return Activated.apply(x * 2, activation)

    assert_same(results(kept(function)), results(function), "output and gradient")


def test_a_lambda_is_an_argument() -> None:
    def function(x):
        return Activated.apply(x * 2, lambda y: y * 3)

    assert_same(results(kept(function)), results(function), "output and gradient")


@pytest.mark.parametrize("wrap", [lambda f: f, functools.partial, lambda f: lambda x: f(x) * 2])
def test_another_function_of_the_same_code_is_not_taken_for_it(wrap) -> None:
    def function(x, activation):
        return Activated.apply(x * 2, wrap(activation))

    compiled = kept(function, fullgraph=False)
    for number in (2, 3, 2):
        activation = times(number)
        assert_same(results(compiled, activation), results(function, activation), "output and gradient")


VALUES = {
    "dtype": torch.float16,
    "device": torch.device("cpu"),
    "class": float,
    "class of a module": torch.nn.Linear,
    "enum": Kind.HIGH,
    "enum of integers": Level.HIGH,
    "list": [1, 2],
    "tuple": (1, "a"),
    "dictionary": {"a": 1},
    "namedtuple": Pair(1, 2),
    "dataclass": Settings(3),
    "range": range(3),
    "None": None,
    "bytes": b"ab",
}


@pytest.mark.parametrize("name", VALUES)
def test_values_keep_their_type(name: str) -> None:
    value = VALUES[name]

    def function(x):
        return Told.apply(x * 2, value)

    assert_same(results(kept(function)), results(function), "output and gradient")


HOLDING_A_TENSOR = {
    "namedtuple": (lambda x: Pair(x, 1), "argument 1 is a Pair with tensors in it"),
    "list": (lambda x: [x], "argument 1 is a list with tensors in it"),
    "dataclass": (Settings, "argument 1.scale is a tensor that the model computes with"),
}


@pytest.mark.parametrize("name", HOLDING_A_TENSOR)
def test_a_tensor_inside_of_an_argument_is_refused_by_name(name: str) -> None:
    wrap, expected = HOLDING_A_TENSOR[name]
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        kept(lambda x: Told.apply(x, wrap(x * 2)))(torch.ones(4))
    assert isinstance(caught.value.inner_exception, ExportError)
    assert str(caught.value.inner_exception).startswith(
        f"tests.dynamo.test_non_tensor_arguments.Told: {expected}"
    )


class Last(torch.autograd.Function):
    """Finds the end of a sequence with NumPy."""

    @staticmethod
    def forward(ctx, x, length):
        ctx.shape = x.shape
        return torch.from_numpy(x.detach().numpy()[:, : int(length[0])][:, -1].copy())

    @staticmethod
    def backward(ctx, grad):
        return grad[:, None].expand(ctx.shape), None


def test_a_length_that_forward_reads_is_the_callers() -> None:
    def function(x, length):
        return Last.apply((x * 2)[None], length)

    for length in (2, 3):
        assert_same(
            results(kept(function), torch.tensor([length])),
            results(function, torch.tensor([length])),
            "output and gradient",
        )


def test_a_forward_that_raises_for_made_up_numbers_runs_between_graphs() -> None:
    def function(x, length):
        return Last.apply((x * 2)[None], length + 1)

    length = torch.tensor([2])
    compiled = kept(function, fullgraph=False)
    assert_same(results(compiled, length), results(function, length), "output and gradient")


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sizes):
        ctx.size = next(iter(sizes.values())) if isinstance(sizes, dict) else sizes[0]
        return x * ctx.size

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.size, None


SIZES = {
    "size": lambda x: x.shape,
    "tuple": lambda x: (x.shape[0], 1),
    "namedtuple": lambda x: Pair(x.shape[0], "a"),
    "dictionary": lambda x: {"rows": x.shape[0]},
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_in_an_argument_are_those_of_the_call(name: str) -> None:
    def function(x):
        return Scaled.apply(x * 2, SIZES[name](x))

    compiled = kept(function)
    for rows in (3, 4, 5):
        x = torch.linspace(-1, 1, rows)
        assert_same(compiled(x), function(x), "output")
