"""Constants stay in the schema, or become tensors on request."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch2ort import io_schema

T = torch.ones(1)


def test_constants_are_no_tensors() -> None:
    tensors, _ = io_schema.flatten([1, 2.5, True, None, "a"])
    assert tensors == []


@pytest.mark.parametrize("constant", [1, 2.5, True, None, "a", 2**100, float("inf"), "\ud800"])
def test_a_constant_comes_back_with_its_type(constant: Any) -> None:
    tensors, schema = io_schema.flatten((T, constant))
    rebuilt = io_schema.unflatten(tensors, schema)[1]
    assert (type(rebuilt), rebuilt) == (type(constant), constant)


@pytest.mark.parametrize("constant", [3, 2.5, True, False, -0.0])
def test_a_number_becomes_what_torch_makes_of_it(constant: Any) -> None:
    ((tensor,), schema) = io_schema.flatten({"x": constant}, constants_as_tensors=True)
    torch.testing.assert_close(tensor, torch.tensor(constant), rtol=0, atol=0)
    assert schema.leaves == ((0, "x", torch.tensor(constant).dtype, 0),)


def test_none_and_str_stay_constants() -> None:
    tensors, schema = io_schema.flatten([None, "a"], constants_as_tensors=True)
    assert tensors == []
    assert io_schema.unflatten([], schema) == [None, "a"]


def test_the_new_tensors_are_made_on_the_device() -> None:
    tensors, _ = io_schema.flatten([1, T], constants_as_tensors=True, device="meta")
    assert [tensor.device.type for tensor in tensors] == ["meta", "cpu"]


def test_data_that_was_seen_as_constants_can_become_tensors() -> None:
    io_schema.flatten([1, 2])
    io_schema.flatten([1, 2])
    tensors, _ = io_schema.flatten([1, 2], constants_as_tensors=True)
    assert len(tensors) == 2


def test_the_schema_with_tensors_is_that_of_tensors() -> None:
    _, with_tensors = io_schema.flatten([1], constants_as_tensors=True)
    assert with_tensors == io_schema.flatten([torch.tensor(5)])[1]
