"""Queries of forward about an argument's metadata lead to a graph of their own, or are refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch2ort
from tests.support.comparison import assert_same


class Asks(nn.Module):
    """Its result depends on a query about its argument."""

    def __init__(self, asks: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.asks = nn.Linear(4, 4), asks

    def forward(self, x):
        return self.layer(x) * (2 if self.asks(x) else 3)


def leaf() -> torch.Tensor:
    return torch.ones(2, 4, requires_grad=True)


def test_a_parameter_gets_a_graph_of_its_own_where_forward_asks_for_one():
    model = Asks(lambda x: isinstance(x, nn.Parameter))
    twin = copy.deepcopy(model)
    wrapped = torch2ort.ORTModule(model)
    given = [leaf(), nn.Parameter(torch.ones(2, 4)), leaf(), nn.Parameter(torch.ones(2, 4))]
    graphs = []
    for x in given:
        assert_same(wrapped(x), twin(x), f"result of a {type(x).__name__}")
        graphs.append(wrapped.exported)
    assert graphs[0] is graphs[2]
    assert graphs[1] is graphs[3]
    assert graphs[0] is not graphs[1]


def test_a_parameter_is_as_good_as_a_tensor_where_forward_does_not_ask():
    model = nn.Linear(4, 4)
    wrapped = torch2ort.ORTModule(model)
    graphs = set()
    for x in (leaf(), nn.Parameter(torch.ones(2, 4)), leaf()):
        assert_same(wrapped(x), model(x), "result")
        graphs.add(id(wrapped.exported))
    assert len(graphs) == 1


def is_leaf(x):
    return x.is_leaf


def has_history(x):
    return x.grad_fn is not None


def is_view(x):
    return x._base is not None


def was_written_to(x):
    return x._version > 0


def test_questions_about_the_past_of_an_argument_are_refused_by_name():
    names = {is_leaf: "is_leaf", has_history: "grad_fn", is_view: "_base", was_written_to: "_version"}
    for asks, name in names.items():
        line = asks.__code__.co_firstlineno + 1
        with pytest.raises(torch2ort.ExportError) as caught:
            torch2ort.ORTModule(Asks(asks))(leaf())
        source = {is_leaf: "x.is_leaf", has_history: "x.grad_fn is not None"}.get(asks)
        source = source or {is_view: "x._base is not None", was_written_to: "x._version > 0"}[asks]
        assert str(caught.value) == (
            f"Asks: {__file__}:{line} in {asks.__name__} (return {source}) asks for the {name} of a tensor, "
            f"which a graph answers by the call that it was made from. Pass what depends on it as an "
            f"argument of its own, such as a bool"
        )


@pytest.mark.parametrize("asks", [is_leaf, has_history])
def test_an_argument_without_a_gradient_is_a_leaf_in_each_call(asks):
    model = Asks(asks)
    x = torch.ones(2, 4)
    assert_same(torch2ort.ORTModule(model)(x), model(x), "result")


def test_a_parameter_of_the_model_is_a_leaf_in_each_call():
    model = Asks(lambda x: True)
    model.asks = lambda x: model.layer.weight.is_leaf
    x = leaf()
    assert_same(torch2ort.ORTModule(model)(x), model(x), "result")


class Retains(nn.Module):
    """Calls retain_grad on its result, or on its argument, where that has no effect."""

    def __init__(self, *, of_argument: bool) -> None:
        super().__init__()
        self.layer, self.of_argument = nn.Linear(4, 4), of_argument

    def forward(self, x):
        h = self.layer(x)
        (x if self.of_argument else h).retain_grad()
        return h


def test_a_gradient_that_forward_keeps_is_refused_by_name():
    line = Retains.forward.__code__.co_firstlineno + 2
    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.ORTModule(Retains(of_argument=False))(leaf())
    assert str(caught.value) == (
        f"Retains: {__file__}:{line} in forward ((x if self.of_argument else h).retain_grad()) keeps the "
        f"gradient of a tensor (retain_grad), which a graph cannot do. Call the original model to look at "
        f"gradients inside of it"
    )


def test_the_gradient_of_a_leaf_is_kept_anyway():
    model = Retains(of_argument=True)
    x = leaf()
    assert_same(torch2ort.ORTModule(model)(x), model(x), "result")
