"""The passes over a gradient graph: each finds what it requires."""

from __future__ import annotations

import pytest

from torch2ort.engines.ort_training.gradient_passes import PASSES, Fact, Pass, in_order


def join(work):
    """Stands for a pass."""


def test_a_pass_that_comes_too_early_is_named():
    with pytest.raises(ValueError, match="too early") as error:
        in_order([Pass(join, frozenset({Fact.MAPS}), Fact.JOINED)])
    assert str(error.value) == (
        "join comes too early: it requires that the in-place maps are chosen, and stand in the nodes"
    )


def test_every_fact_is_ensured_by_one_pass():
    assert sorted(one.ensures.name for one in PASSES) == sorted(fact.name for fact in Fact)
