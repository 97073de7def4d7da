"""Data that cannot be flattened or built raises a SchemaError with the place, the cause and a remedy."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import optree
import pytest
import torch

from tests.io_schema.nested import Batch, Box, Point
from torch2ort import io_schema
from torch2ort.errors import SchemaError

T = torch.ones(1)
ADVICE = (
    "Pass its tensors in a tuple, list or dict, or register its class: "
    "optree.register_pytree_node(..., namespace='torch2ort')."
)


def refusal(data: Any, **arguments: Any) -> str:
    with pytest.raises(SchemaError) as caught:
        io_schema.flatten(data, **arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("data", "path", "name"),
    [
        ({1, 2}, "data", "set"),
        ([T, {"a": object()}], "data[1]['a']", "object"),
        (Point(T, np.ones(2)), "data.y", "numpy.ndarray"),
        (Batch(T, [np.float64(2)]), "data.mask[0]", "numpy.float64"),
        ({("a", 1): torch.float32}, "data[('a', 1)]", "torch.dtype"),
        (Box([1, 2j]), "data[<flat index 1>]", "complex"),
        ([{}, torch.nn.Linear(1, 1)], "data[1]", "torch.nn.modules.linear.Linear"),
    ],
)
def test_an_unsupported_leaf_is_named_with_its_path(data: Any, path: str, name: str) -> None:
    assert refusal(data) == (
        f"{path}: expected a tensor, None, a str, bool, int or float, or a container of them, got a value of "
        f"type {name}. {ADVICE}"
    )


def test_the_first_of_several_obstacles_is_named() -> None:
    assert refusal([T, [{1}], object()]).startswith("data[1][0]: ")


def test_the_root_of_the_path_can_be_named() -> None:
    assert refusal([{1}], root="outputs").startswith("outputs[0]: ")


def test_a_cycle_is_named_with_both_ends() -> None:
    inner: dict[str, Any] = {}
    inner["up"] = (T, inner)
    assert refusal([T, inner]) == (
        "data[1]['up'][1]: refers back to data[1], and a cycle cannot be flattened. Pass the data without "
        "that reference."
    )


def test_a_cycle_through_a_dataclass_is_found() -> None:
    data = Batch(T)
    data.mask = [data]
    assert refusal(data).startswith("data.mask[0]: refers back to data, and a cycle cannot be flattened.")


def test_the_same_object_twice_is_no_cycle() -> None:
    shared = [T]
    tensors, _ = io_schema.flatten([shared, {"a": shared}])
    assert [tensor is T for tensor in tensors] == [True, True]


@pytest.mark.parametrize(
    ("wrap", "step"),
    [
        (lambda x: [x], "[0]"),
        (lambda x: {"k": x}, "['k']"),
        (Batch, ".ids"),
        (lambda x: Box([x]), "[<flat index 0>]"),
    ],
)
def test_5000_levels_are_too_deep(wrap: Any, step: str) -> None:
    data: Any = T
    for _ in range(5000):
        data = wrap(data)
    limit = optree.MAX_RECURSION_DEPTH
    assert refusal(data) == (
        f"data{step * 6}...{step * 6} ({limit + 1} levels deep): nested too deep; at most {limit} levels can "
        "be flattened. Pass flatter data."
    )


def test_a_container_that_opens_without_end_is_too_deep() -> None:
    class Endless(Box):
        pass

    optree.register_pytree_node(
        Endless, lambda box: ([Endless([])], None), lambda _, items: Endless(items), namespace="torch2ort"
    )
    assert "nested too deep; at most" in refusal(Endless([]))


def test_data_that_changes_by_being_read_is_refused() -> None:
    class Fickle(Box):
        reads = 0

    def flatten(box: Box) -> Any:
        Fickle.reads += 1
        return ([{1}] if Fickle.reads == 1 else [T]), None

    optree.register_pytree_node(Fickle, flatten, lambda _, items: Fickle(items), namespace="torch2ort")
    assert refusal([Fickle([])]) == (
        "data: its containers held something else when they were taken apart a second time. Pass data that "
        "does not change by being read."
    )


def test_an_int_of_more_than_64_bits_cannot_become_a_tensor() -> None:
    message = refusal({"a": [True, 2**70]}, constants_as_tensors=True)
    assert message.startswith("data['a'][1]: torch.tensor(1180591620717411303424) failed: ")
    assert message.endswith(". Pass a number that fits torch's types, or leave constants_as_tensors off.")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_unflatten_refuses_a_wrong_number_of_tensors(count: int) -> None:
    _, schema = io_schema.flatten({"a": T, "b": [T, 1]})
    with pytest.raises(SchemaError) as caught:
        io_schema.unflatten([T] * count, schema)
    assert str(caught.value) == (
        f"unflatten: expected 2 tensors ('a', 'b_0'), got {count}. Pass one for each of schema.leaves."
    )


def test_unflatten_refuses_tensors_for_a_schema_without_any() -> None:
    _, schema = io_schema.flatten([1])
    with pytest.raises(SchemaError) as caught:
        io_schema.unflatten([T], schema)
    assert str(caught.value) == (
        "unflatten: expected 0 tensors (the schema has none), got 1. Pass one for each of schema.leaves."
    )


def test_unflatten_names_only_the_first_of_many_tensors() -> None:
    _, schema = io_schema.flatten([T] * 10)
    with pytest.raises(
        SchemaError, match=re.escape("expected 10 tensors ('0', '1', '2', '3', '4', '5', '6', '7', ...)")
    ):
        io_schema.unflatten([], schema)
