"""Parameters that are tied, untied or replaced after a step: the next step reads the new ones."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import torch2ort
from tests.support.comparison import assert_same
from torch2ort import io_schema
from torch2ort.cache.key.key import dependencies


class Two(nn.Module):
    """Two layers, whose weights may be one parameter."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        if tied:
            tie(self)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def tie(model: Two) -> None:
    model.second.weight = model.first.weight


def part(model: Two) -> None:
    model.second.weight = nn.Parameter(torch.arange(16.0).view(4, 4) / 8)


def assert_same_step(wrapped: nn.Module, twin: nn.Module, what: str) -> None:
    """Compare the result of a call, and the gradients, with the twin's."""
    x = torch.linspace(-1.0, 1.0, 8).view(2, 4)
    results = []
    for module in (wrapped, twin):
        module.zero_grad()
        result = module(x)
        result.square().sum().backward()
        results.append([result.detach(), *(p.grad for p in module.parameters())])
    for actual, expected in zip(*results, strict=True):
        assert_same(actual, expected, what)


@pytest.mark.parametrize(
    ("tied", "change"), [(True, part), (False, tie), (False, part)], ids=["parted", "tied", "replaced"]
)
def test_a_step_reads_the_weights_that_stand_there(tied: bool, change: Callable[[Two], None]):
    model = Two(tied=tied)
    twin = copy.deepcopy(model)
    wrapped = torch2ort.ORTModule(model)
    assert_same_step(wrapped, twin, "before")
    change(model)
    change(twin)
    for call in range(2):
        assert_same_step(wrapped, twin, f"step {call} after the change")


def test_a_change_is_told_each_time_it_is_asked_for():
    model = Two(tied=False)
    tensors, schema = io_schema.flatten({"x": torch.randn(2, 4)})
    guards = dependencies(model, tensors, schema).arm_guards()
    tie(model)
    assert str(guards.first_change()) == str(guards.first_change()) == "_parameters of module second"


def test_another_weight_of_the_same_form_is_no_change_and_is_noted_when_it_is_accepted():
    model = Two(tied=False)
    tensors, schema = io_schema.flatten({"x": torch.randn(2, 4)})
    guards = dependencies(model, tensors, schema).arm_guards()
    part(model)
    assert (guards.first_change(), guards.moves) == (None, 0)
    assert (guards.accept(), guards.moves) == (None, 1)
    assert (guards.accept(), guards.moves) == (None, 1)


class Taught(nn.Module):
    """A layer, and one in a list, which is not among the model's modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.teacher = [nn.Linear(4, 4).requires_grad_(False)]

    def forward(self, x):
        return torch.tanh(self.layer(x)) - self.teacher[0](x)


def double_in_place(model: Taught) -> None:
    model.teacher[0].weight.mul_(2)


def replace_parameter(model: Taught) -> None:
    model.teacher[0].weight = nn.Parameter(model.teacher[0].weight * 2, requires_grad=False)


def replace_data(model: Taught) -> None:
    model.teacher[0].weight.data = model.teacher[0].weight * 2


def load_state(model: Taught) -> None:
    model.teacher[0].load_state_dict({k: v * 2 for k, v in model.teacher[0].state_dict().items()})


def replace_module(model: Taught) -> None:
    model.teacher[0] = copy.deepcopy(model.teacher[0])
    double_in_place(model)


@pytest.mark.parametrize(
    "change", [double_in_place, replace_parameter, replace_data, load_state, replace_module]
)
def test_a_module_in_a_list_is_read_as_it_is(change: Callable[[Taught], None]):
    model = Taught()
    twin = copy.deepcopy(model)
    wrapped = torch2ort.ORTModule(model)
    assert_same_step(wrapped, twin, "before")
    change(model)
    change(twin)
    assert_same_step(wrapped, twin, "after the change")
