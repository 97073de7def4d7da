"""The message about the first difference of two schemas."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import pytest
import torch

from tests.io_schema.nested import Batch, Box, Point
from torch2ort import io_schema

T = torch.ones(1)


def schema_of(data: Any) -> io_schema.Schema:
    return io_schema.flatten(data)[1]


@pytest.mark.parametrize(
    ("expected", "given", "sentence"),
    [
        (
            {"past": (T, torch.ones(1, 1, 1))},
            {"past": (T, torch.ones(1, 1).long())},
            "data['past'][1]: expected a float32 tensor of rank 3, got int64 of rank 2",
        ),
        (T.long(), 3, "data: expected an int64 tensor of rank 1, got the int 3"),
        ([True], [1], "data[0]: expected the bool True, got the int 1"),
        ([0.0], [-0.0], "data[0]: expected the float 0.0, got the float -0.0"),
        ([None], ["a"], "data[0]: expected None, got the str 'a'"),
        (
            ["a" * 99 + "b"],
            ["a" * 99 + "c"],
            f"data[0]: expected the str '{'a' * 27}...{'a' * 27}b', got the str '{'a' * 27}...{'a' * 27}c'",
        ),
        (
            ["a" * 99 + "b" * 99],
            ["a" * 98 + "b" * 100],
            f"data[0]: expected the str '{'a' * 27}...{'b' * 28}', got another one",
        ),
        ([T], T, "data: expected a list of 1 item, got a float32 tensor of rank 1"),
        ([T], (T, T), "data: expected a list of 1 item, got a tuple of 2 items"),
        (
            {"a": 1},
            {"a": 1, "b": 2},
            "data: expected a dict with 1 key, got a dict with 2 keys (unexpected: 'b')",
        ),
        (
            {"a": 1, "b": 2},
            {},
            "data: expected a dict with 2 keys, got a dict with 0 keys (missing: 'a', 'b')",
        ),
        (
            {1: 1},
            {True: 1},
            "data: expected a dict with 1 key, got another one (missing: 1; unexpected: True)",
        ),
        (
            {"a": 1, "b": 2},
            {"b": 2, "a": 1},
            "data: expected a dict with 2 keys, got another one (in the order 'b', 'a')",
        ),
        (
            {"a": 1},
            OrderedDict(a=1),
            "data: expected a dict with 1 key, got a collections.OrderedDict with 1 key",
        ),
        (
            defaultdict(int),
            defaultdict(list),
            "data: expected a collections.defaultdict with 0 keys, got another one "
            "(expected <class 'int'>, got <class 'list'>)",
        ),
        (
            deque(),
            deque(maxlen=2),
            "data: expected a collections.deque of 0 items, got another one (expected None, got 2)",
        ),
        (
            Box([T], 1),
            Box([T], True),
            "data: expected a tests.io_schema.nested.Box of 1 item, got another one (expected 1, got True)",
        ),
        (Batch([1]), Batch([2]), "data.ids[0]: expected the int 1, got the int 2"),
        (Batch(1), None, "data: expected a tests.io_schema.nested.Batch with 2 fields, got None"),
        (
            Point(1, {"a": T}),
            Point(1, {"a": 1}),
            "data.y['a']: expected a float32 tensor of rank 1, got the int 1",
        ),
        (
            [[1, T], T],
            [[1, T.int()], 5],
            "data[0][1]: expected a float32 tensor of rank 1, got int32 of rank 1",
        ),
    ],
)
def test_the_first_difference_is_told(expected: Any, given: Any, sentence: str) -> None:
    assert schema_of(expected).difference(schema_of(given)) == sentence


def test_two_classes_of_one_name_are_told_apart() -> None:
    a, b = (namedtuple("Twin", ["x"], module="somewhere") for _ in range(2))
    assert schema_of(a(1)).difference(schema_of(b(1))) == (
        "data: expected a somewhere.Twin of 1 item, got another one"
    )


def test_equal_schemas_have_no_difference() -> None:
    assert schema_of({"a": [T, 1]}).difference(schema_of({"a": [T + 1, 1]})) is None


def test_the_root_of_the_path_can_be_named() -> None:
    sentence = schema_of([T]).difference(schema_of([1]), root="outputs")
    assert sentence == "outputs[0]: expected a float32 tensor of rank 1, got the int 1"


def test_a_long_path_is_shown_without_its_middle() -> None:
    expected, given = T, 1
    for _ in range(100):
        expected, given = [expected], [given]
    assert schema_of(expected).difference(schema_of(given)) == (
        f"data{'[0]' * 6}...{'[0]' * 6} (100 levels deep): expected a float32 tensor of rank 1, got the int 1"
    )
