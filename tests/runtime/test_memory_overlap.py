"""Calls whose inputs share memory that forward writes to, and calls that only resemble them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torch2ort
from tests.support.comparison import assert_same
from torch2ort.runtime.memory_overlap import overlap


class Writes(nn.Module):
    """Writes to one input and reads the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("offset", torch.zeros(2, 4))

    def forward(self, x, y):
        x.add_(1)
        self.offset.add_(1)
        return self.layer(y) + x + self.offset


def values(count: int) -> torch.Tensor:
    return torch.arange(float(count)) / count


def equal_views() -> tuple[torch.Tensor, torch.Tensor]:
    x = values(8)
    return x.view(2, 4), x.view(2, 4)


def two_views() -> tuple[torch.Tensor, torch.Tensor]:
    x = values(12)
    return x[:8].view(2, 4), x[4:].view(2, 4)


def transposed() -> tuple[torch.Tensor, torch.Tensor]:
    x = values(16).view(4, 4)
    return x.t()[:2], x[:2]


SHARED = (
    "Writes: the argument 'x' shares memory with {}, and forward writes to it, which a graph does once it "
    "has read all of them. Pass a clone() of one of them"
)


@pytest.mark.parametrize("make", [equal_views, two_views, transposed])
@pytest.mark.parametrize("first", [True, False], ids=["in the first call", "in the second call"])
def test_inputs_that_share_written_memory_are_refused(make, first: bool):
    wrapped = torch2ort.ORTModule(Writes())
    if not first:
        wrapped(values(8).view(2, 4), values(8).view(2, 4))
    with pytest.raises(torch2ort.ExportError) as caught:
        wrapped(*make())
    assert str(caught.value) == SHARED.format("the argument 'y'")


def test_an_input_that_is_a_written_buffer_is_refused():
    model = Writes()
    wrapped = torch2ort.ORTModule(model)
    wrapped(torch.zeros(2, 4), torch.zeros(2, 4))
    with pytest.raises(torch2ort.ExportError) as caught:
        wrapped(torch.zeros(2, 4), model.offset)
    expected = SHARED.format("the model's 'offset'").replace("'x'", "'y'")
    assert str(caught.value) == expected


def test_an_exported_model_refuses_inputs_that_share_written_memory():
    exported = torch2ort.export(Writes(), (values(8).view(2, 4), torch.zeros(2, 4)))
    with pytest.raises(torch2ort.ExportError) as caught:
        exported(*[values(8).view(2, 4)] * 2)
    assert str(caught.value) == SHARED.format("the argument 'y'").replace("Writes", "ExportedModel")


def test_views_beside_one_another_are_inputs_of_their_own():
    model = Writes()
    twin = copy.deepcopy(model)
    wrapped = torch2ort.ORTModule(model)
    memory, twins = values(16).view(2, 8), values(16).view(2, 8)
    for _ in range(2):
        actual = wrapped(memory[:, ::2], memory[:, 1::2])
        assert_same(actual, twin(twins[:, ::2], twins[:, 1::2]), "result")
        assert_same(memory, twins, "inputs")


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((slice(None), 0), (slice(None), 1), False),
        ((slice(None), 0), (0,), True),
        ((0,), (1,), False),
        ((slice(0, 2),), (slice(1, 3),), True),
        ((slice(0, 0),), (slice(0, 3),), False),
    ],
)
def test_an_overlap_is_one_of_elements(one, other, expected: bool):
    x = torch.zeros(4, 4)
    assert overlap(x[one], x[other]) is expected
