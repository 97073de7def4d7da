"""Equality of schemas: exactly then ``match`` accepts, ``difference`` is empty and hashes agree."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.io_schema.nested import Batch, Box, Color, Frozen, Pair, Point, Stack, nested, same
from torch2ort import io_schema

NAN = float("nan")


def schema_of(data: Any) -> io_schema.Schema:
    return io_schema.flatten(data)[1]


def like(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.dim() == b.dim()


# Few values, so that two structures are often equal or nearly so.
_leaves = st.sampled_from(
    [
        True,
        1,
        1.0,
        0.0,
        -0.0,
        NAN,
        None,
        "a",
        torch.ones(1),
        torch.ones(2),
        torch.ones(1, 1),
        torch.tensor([1]),
    ]
)
_keys = st.sampled_from(["a", "b", 1, True, 1.0, 0.0, -0.0, Color.RED, ("a", 1), ("a", True)])


def _few(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(items, max_size=2)
    dicts = st.lists(st.tuples(_keys, items), max_size=2).map(dict)
    return st.one_of(
        lists,
        lists.map(tuple),
        dicts,
        dicts,
        dicts.map(OrderedDict),
        st.builds(defaultdict, st.sampled_from([list, int]), dicts),
        st.builds(deque, lists, st.sampled_from([None, 2])),
        st.builds(Point, items, items),
        st.builds(Batch, items, items),
        lists.map(Stack),
        st.builds(Box, lists, _leaves.filter(lambda leaf: not isinstance(leaf, torch.Tensor))),
    )


similar = st.recursive(_leaves, _few, max_leaves=4)


@settings(max_examples=500)
@given(similar, similar)
def test_schemas_are_equal_exactly_if_all_but_the_tensors_is(a: Any, b: Any) -> None:
    assert (schema_of(a) == schema_of(b)) is same(a, b, like)


@settings(max_examples=500)
@given(similar, similar)
def test_match_accepts_exactly_the_data_with_an_equal_schema(a: Any, b: Any) -> None:
    assert (schema_of(a).match(b) is not None) is (schema_of(a) == schema_of(b))


@settings(max_examples=500)
@given(similar, similar)
def test_difference_is_none_exactly_for_equal_schemas(a: Any, b: Any) -> None:
    assert (schema_of(a).difference(schema_of(b)) is None) is (schema_of(a) == schema_of(b))


@settings(max_examples=500)
@given(nested)
def test_equal_schemas_have_equal_hashes(data: Any) -> None:
    tensors, schema = io_schema.flatten(data)
    copied = io_schema.unflatten([tensor.clone() for tensor in tensors], schema)
    assert hash(schema_of(copied)) == hash(schema)


@settings(max_examples=500)
@given(nested)
def test_match_gives_the_tensors_that_flatten_gives(data: Any) -> None:
    tensors, schema = io_schema.flatten(data)
    matched = schema.match(data)
    assert matched is not None
    assert list(map(id, matched)) == list(map(id, tensors))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (True, 1),
        (1, 1.0),
        (True, 1.0),
        (0.0, -0.0),
        (None, False),
        ("1", 1),
        ([], ()),
        ({}, OrderedDict()),
        ({"a": 1}, defaultdict(None, {"a": 1})),
        (defaultdict(int, {"a": 1}), defaultdict(list, {"a": 1})),
        (deque([1]), deque([1], maxlen=2)),
        ({"a": 1, "b": 1}, {"b": 1, "a": 1}),
        ({1: 2}, {True: 2}),
        ({1: 2}, {1.0: 2}),
        ({0.0: 2}, {-0.0: 2}),
        ((1, 2), Pair((1, 2))),
        (Point(1, 2), (1, 2)),
        (Box([1], 1), Box([1], True)),
        (Frozen(1), Batch(1)),
        (torch.ones(1), torch.ones(1, 1)),
        (torch.ones(1), torch.ones(1).double()),
        (torch.tensor(1), 1),
    ],
)
def test_what_python_may_call_equal_makes_different_schemas(a: Any, b: Any) -> None:
    assert schema_of(a) != schema_of(b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (NAN, -float("nan")),
        ({NAN: 1}, {float("nan"): 1}),
        (torch.ones(2, 3), torch.zeros(5, 1, requires_grad=True)),
        (torch.ones(2), torch.nn.Parameter(torch.ones(2))),
        ([torch.ones(2)], [torch.ones(2, device="meta")]),
    ],
)
def test_what_a_graph_cannot_tell_apart_makes_equal_schemas(a: Any, b: Any) -> None:
    assert schema_of(a) == schema_of(b)


def test_two_classes_of_one_name_make_different_schemas() -> None:
    a, b = (namedtuple("Twin", ["x"]) for _ in range(2))
    assert schema_of(a(1)) != schema_of(b(1))


def test_a_schema_is_not_equal_to_anything_else() -> None:
    assert schema_of(1) != 1


def test_a_schema_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        schema_of(1).leaves = ()


def test_a_schema_serves_as_a_key() -> None:
    graphs = {schema_of({"x": torch.ones(1)}): "first", schema_of({"x": torch.ones(1, 1)}): "second"}
    assert graphs[schema_of({"x": torch.zeros(3)})] == "first"


def test_match_refuses_what_cannot_be_flattened() -> None:
    assert schema_of([1]).match([{1}]) is None


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda schema: pickle.loads(pickle.dumps(schema))]
)
def test_a_copy_is_equal_and_builds_the_same(copied: Any) -> None:
    tensors, schema = io_schema.flatten({"a": Batch(torch.ones(1), Point(1, 2.5)), 3: Box([torch.ones(2)])})
    assert copied(schema) == schema
    assert same(io_schema.unflatten(tensors, copied(schema)), io_schema.unflatten(tensors, schema), like)


def test_a_structure_nested_nearly_too_deep_still_matches() -> None:
    data: Any = torch.ones(2)
    for _ in range(900):
        data = [data]
    (tensor,), schema = io_schema.flatten(data)
    matched = schema.match(data)
    assert matched is not None
    assert matched[0] is tensor


def nest(data: Any, levels: int) -> Any:
    for _ in range(levels):
        data = {"k": [data]}
    return data


@pytest.mark.parametrize("levels", [20, 49, 50, 51, 150, 450])
@pytest.mark.parametrize("other", [[torch.ones(1), 1], (torch.ones(1), 2), {"a": torch.ones(1), 1: 1}])
def test_a_difference_far_down_is_seen(levels: int, other: Any) -> None:
    _, schema = io_schema.flatten(nest((torch.ones(1), 1), levels))
    assert schema.match(nest(other, levels)) is None


@pytest.mark.parametrize("levels", [20, 49, 50, 51, 150, 450])
def test_a_difference_of_keys_far_down_is_seen(levels: int) -> None:
    _, schema = io_schema.flatten(nest({"a": torch.ones(1), "b": 1}, levels))
    assert schema.match(nest({"a": torch.ones(1), "b": 1}, levels)) is not None
    assert schema.match(nest({"a": torch.ones(1), "c": 1}, levels)) is None
