"""Flattened data can be built again: the same structure, and the same tensors, not copies of them."""

from __future__ import annotations

import operator
from typing import Any

import pytest
from hypothesis import given, settings

from tests.io_schema.nested import nested, same, tensors_in
from torch2ort import io_schema


def check_round_trip(data: Any) -> None:
    tensors, schema = io_schema.flatten(data)
    assert list(map(id, tensors)) == list(map(id, tensors_in(data)))
    assert same(io_schema.unflatten(tensors, schema), data, operator.is_)


@settings(max_examples=500)
@given(nested)
def test_unflatten_inverts_flatten(data: Any) -> None:
    check_round_trip(data)


@pytest.mark.long
@pytest.mark.timeout(1200)
@settings(max_examples=10_000)
@given(nested)
def test_unflatten_inverts_flatten_for_10000_examples(data: Any) -> None:
    check_round_trip(data)


@settings(max_examples=500)
@given(nested)
def test_flatten_of_the_rebuilt_data_gives_the_same_schema(data: Any) -> None:
    tensors, schema = io_schema.flatten(data)
    again, schema_again = io_schema.flatten(io_schema.unflatten(tensors, schema))
    assert list(map(id, again)) == list(map(id, tensors))
    assert schema_again == schema
