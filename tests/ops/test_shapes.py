"""Operators at the edges of their kernels give eager's outputs and gradients."""

from __future__ import annotations

import functools

import pytest

from tests.ops.shapes import SHAPES
from tests.ops.sweep import Outcome, sweep


@functools.cache
def outcomes() -> dict[str, Outcome]:
    return sweep(SHAPES)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SHAPES)
def test_an_operator_at_an_edge_is_equal_to_eager(name: str) -> None:
    outcome = outcomes()[name]
    assert (outcome.state, outcome.detail) == ("equal", "")
