"""The names of tensors: the path joined by ``_``, and never the same name twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given

from tests.io_schema.nested import Attributes, Batch, Box, Color, Point, nested, output_of
from torch2ort import io_schema

T = torch.ones(1)


class Opaque:
    """A key whose text holds its address."""


def names_of(data: Any) -> list[str]:
    return [leaf.name for leaf in io_schema.flatten(data)[1].leaves]


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (T, [""]),
        ([T], ["0"]),
        ({"a": {"b": T}}, ["a_b"]),
        ([None, {"c": (T,)}], ["1_c_0"]),
        (Point(T, T), ["x", "y"]),
        (torch.ones(2, 2).max(dim=0), ["values", "indices"]),
        (Batch(T, [T]), ["ids", "mask_0"]),
        (output_of({"hidden": (T, T)}), ["logits", "hidden_0", "hidden_1"]),
        (Attributes(a=T), ["a"]),
        (Box([T, T]), ["0", "1"]),
        ({1: T, None: T, 2.5: T}, ["1", "None", "2.5"]),
        ({Color.RED: T, ("a", 1): T, torch.float32: T, int: T}, ["RED", "a_1", "torch.float32", "int"]),
        ({Opaque(): T}, ["Opaque"]),
    ],
)
def test_a_name_is_the_path(data: Any, names: list[str]) -> None:
    assert names_of(data) == names


@pytest.mark.parametrize(
    ("data", "names"),
    [
        ({"a": {"b": T}, "a_b": T}, ["a_b_2", "a_b"]),
        ({"a_b": T, "a": {"b": T}}, ["a_b", "a_b_2"]),
        ({1: T, "1": T}, ["1", "1_2"]),
        ({"a": [T], "a_0": T, "a_0_2": T}, ["a_0_3", "a_0", "a_0_2"]),
        ({"a": {"b_c": T}, "a_b": {"c": T}, "d": {"a_b_c": T}}, ["a_b_c", "a_b_c_2", "d_a_b_c"]),
        ({Opaque(): T, Opaque(): T}, ["Opaque", "Opaque_2"]),
    ],
)
def test_of_equal_paths_the_shortest_then_the_first_keeps_its_name(data: Any, names: list[str]) -> None:
    assert names_of(data) == names


@given(nested)
def test_no_two_tensors_share_a_name(data: Any) -> None:
    names = names_of(data)
    assert len(set(names)) == len(names)


def test_leaves_say_position_name_dtype_and_rank() -> None:
    _, schema = io_schema.flatten({"x": T.long(), "n": 3, "y": [torch.ones(2, 3)]})
    assert schema.leaves == ((0, "x", torch.int64, 1), (1, "y_0", torch.float32, 2))
