"""Operators at the edges of their kernels give eager's outputs and gradients."""

from __future__ import annotations

import functools

import pytest

from tests.ops.shapes import SHAPES
from tests.ops.sweep import Outcome, sweep
from tests.support.sweeps import sample_cases

QUICK = frozenset(list(SHAPES)[::2])


@functools.cache
def outcomes(quick: bool) -> dict[str, Outcome]:
    return sweep({name: snippet for name, snippet in SHAPES.items() if (name in QUICK) == quick})


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sample_cases(SHAPES, 5))
def test_an_operator_at_an_edge_is_equal_to_eager(name: str) -> None:
    outcome = outcomes(name in QUICK)[name]
    assert (outcome.state, outcome.detail) == ("equal", "")
