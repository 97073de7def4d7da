"""Functions that return their argument's own memory without declaring it in their schema do so in a graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torch2ort
from tests.support.comparison import assert_same
from tests.support.sweeps import sample_cases


class Model(torch.nn.Module):
    def __init__(self, body: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self._body = body

    def forward(self, x: torch.Tensor) -> Any:
        return self._body(x)


DROPS_NOTHING: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Sequence[int]]] = {
    "in evaluation": (lambda x: F.dropout(x, 0.3, training=False), (2, 4)),
    "with a probability of 0": (lambda x: torch.dropout(x, 0.0, True), (2, 4)),
    "of no elements": (lambda x: F.dropout(x, 0.3), (0, 4)),
    "a module": (torch.nn.Dropout(0.3).eval(), (2, 4)),
    "in place": (lambda x: F.dropout(x, 0.3, training=False, inplace=True), (2, 4)),
}
SHARING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{name: function for name, (function, _) in DROPS_NOTHING.items()},
    "unsafe_chunk": lambda x: x.unsafe_chunk(2, 1)[1],
    "unsafe_split": lambda x: torch.unsafe_split(x, 3, dim=1)[1],
    "unsafe_split_with_sizes": lambda x: x.unsafe_split_with_sizes([1, 3], -1)[0],
}


@pytest.mark.parametrize("function", sample_cases(SHARING.values(), 2), ids=SHARING)
@pytest.mark.parametrize("gradients", [False, True])
def test_a_write_to_the_result_reaches_the_argument(
    function: Callable[[torch.Tensor], torch.Tensor], gradients: bool
) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        hidden = x * 2
        function(hidden).add_(1)
        return hidden

    x = torch.randn(2, 4, requires_grad=gradients)
    assert_same(torch2ort.ORTModule(Model(body))(x), Model(body)(x), "the argument")


@pytest.mark.parametrize(("function", "shape"), DROPS_NOTHING.values(), ids=DROPS_NOTHING)
def test_dropout_that_drops_nothing_gives_the_tensor_itself(
    function: Callable[[torch.Tensor], torch.Tensor], shape: Sequence[int]
) -> None:
    x = torch.randn(*shape)
    assert torch2ort.ORTModule(Model(function))(x) is x


@pytest.mark.parametrize(("function", "shape"), DROPS_NOTHING.values(), ids=DROPS_NOTHING)
def test_dropout_that_drops_nothing_keeps_the_gradient_under_no_grad(
    function: Callable[[torch.Tensor], torch.Tensor], shape: Sequence[int]
) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        hidden = x * 2
        with torch.no_grad():
            same = function(hidden)
        return same.sin()

    model = Model(body)
    x = torch.randn(*shape, requires_grad=True)
    y = copy.deepcopy(x)
    expected, found = model(x), torch2ort.ORTModule(model)(y)
    assert_same(found, expected, "the result")
    expected.sum().backward()
    found.sum().backward()
    assert_same(y.grad, x.grad, "the gradient")


GIVES_ITS_ARGUMENT: dict[str, Callable[[torch.Tensor], Any]] = {
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, x[:, :1])[0],
    "a loss that broadcasts": lambda x: F.mse_loss(x, x * 2),
    "contiguous": lambda x: x.contiguous(),
    "to a dtype": lambda x: x.to(torch.float32),
    "to a device": lambda x: x.to("cpu"),
    "type_as": lambda x: x.type_as(x),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=False),
    "feature_dropout": lambda x: torch.feature_dropout(x, 0.0, True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, training=False),
    "atleast_2d": torch.atleast_2d,
    "resolve_conj": lambda x: x.resolve_conj(),
    "real": torch.real,
    "positive": lambda x: +x,
    "sum_to_size": lambda x: x.sum_to_size(2, 4),
    "flatten": lambda x: x.flatten(1),
    "one after another": lambda x: torch.real(+x.float()),
}


@pytest.mark.parametrize("function", GIVES_ITS_ARGUMENT.values(), ids=GIVES_ITS_ARGUMENT)
def test_what_an_operator_returned_under_no_grad_keeps_its_gradient(
    function: Callable[[torch.Tensor], Any],
) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        hidden = x * 2
        with torch.no_grad():
            function(hidden)
        return hidden.sin()

    model = Model(body)
    x = torch.randn(2, 4, requires_grad=True)
    y = copy.deepcopy(x)
    expected, found = model(x), torch2ort.ORTModule(model)(y)
    assert_same(found, expected, "the result")
    expected.sum().backward()
    found.sum().backward()
    assert_same(y.grad, x.grad, "the gradient")


@pytest.mark.parametrize("p", [-0.1, 1.5])
def test_a_probability_that_there_is_not_is_refused_as_in_eager(p: float) -> None:
    model = Model(lambda x: F.dropout(x, p, training=False))
    with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
        model(torch.ones(2))
    with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
        torch2ort.ORTModule(model)(torch.ones(2))
