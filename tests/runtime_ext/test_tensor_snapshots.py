"""Snapshots of a step's tensors: their form, their address, and their version counter."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from torch2ort.pythonop.native import native


def writes_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def noted(*tensors: torch.Tensor) -> native.Noted:
    return native.Noted(tensors, writes_of)


def form(*tensors: torch.Tensor) -> bytes | None:
    return native.form(list(tensors), Parameter)


def test_nothing_moved_and_nothing_was_written():
    found = noted(torch.ones(3), torch.ones(2))
    assert (found.moved((0, 1)), found.written((0, 1))) == ([], [])


def test_a_tensor_that_was_given_other_memory_moved():
    x, y = torch.ones(3), torch.ones(3)
    found = noted(x, y)
    y.data = torch.ones(3)
    assert (found.moved((0, 1)), found.moved((0,))) == ([1], [])


def test_a_tensor_whose_memory_was_freed_moved():
    x = torch.ones(3)
    found = noted(x)
    x.untyped_storage().resize_(0)
    assert found.moved((0,)) == [0]


def test_writes_are_counted_from_the_note_on():
    x, y = torch.ones(3), torch.ones(3)
    y.add_(1)
    found = noted(x, y)
    y.mul_(2)
    y.view(-1)[0] = 3
    assert found.written((0, 1)) == [(1, 3, 1)]


def test_of_inference_mode_nothing_is_counted():
    with torch.inference_mode():
        x = torch.ones(3)
        found = noted(x)
        x.add_(1)
    assert found.written((0,)) == []


def test_what_is_no_tensor_is_refused():
    with pytest.raises(TypeError, match=r"^Noted: item 1 is of type int$"):
        native.Noted((torch.ones(1), 3), writes_of)


def test_a_position_that_is_none_is_refused():
    with pytest.raises(IndexError):
        noted(torch.ones(1)).moved((1,))


def test_equal_tensors_have_one_form():
    assert form(torch.ones(2, 3), Parameter(torch.ones(1))) == form(
        torch.zeros(2, 3), Parameter(torch.ones(1))
    )


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(3, 2),
        torch.ones(3, 2).t(),
        torch.ones(2, 3, dtype=torch.float64),
        torch.ones(2, 3, dtype=torch.int32),
        torch.ones(2, 3, requires_grad=True),
        Parameter(torch.ones(2, 3), requires_grad=False),
        torch.ones(1, 3).expand(2, 3),
        torch.ones(2, 3, 1),
    ],
    ids=["sizes", "strides", "float64", "int32", "requires_grad", "parameter", "expanded", "rank"],
)
def test_tensors_that_a_graph_tells_apart_differ_in_form(other):
    assert form(torch.ones(2, 3)) != form(other)


def test_one_tensor_twice_differs_in_form_from_two():
    x = torch.ones(3)
    assert form(x, x) == form(*[torch.zeros(3)] * 2) != form(x, torch.ones(3))


class Mine(torch.Tensor):
    """A tensor class of the user's."""


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 3).as_subclass(Mine),
        torch.ones(2, 3).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ],
    ids=["subclass", "sparse", "nested"],
)
def test_what_is_no_plain_strided_tensor_has_none(tensor):
    assert form(torch.ones(1), tensor) is None
