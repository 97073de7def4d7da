"""Models of padded batches give eager PyTorch's results, and leave out rows that none of them reads."""

from __future__ import annotations

import collections

import pytest

from tests.random_programs.padded_models import count, draw, is_as_expected, run
from tests.random_programs.padded_parts import (
    ATTENTIONS,
    EMBEDDINGS,
    ENDINGS,
    KEEPS,
    MISSES,
    PARTS,
    WHOLE_ENDINGS,
)

# Models of about 20 seconds: eight whose steps leave out rows, and four near misses.
SPARSE = (6, 25, 41, 48, 49, 52, 84, 88)
NEAR_MISSES = (2, 7, 13, 23)
ALL = range(200)


@pytest.mark.parametrize("seed", SPARSE)
def test_a_model_leaves_out_rows_and_gives_eagers_results(seed) -> None:
    outcome = run(draw(seed))
    assert outcome.kind == "sparse", f"{draw(seed)}\n{outcome}"


@pytest.mark.parametrize("seed", NEAR_MISSES)
def test_a_model_that_reads_padding_is_computed_in_all_rows_like_eager(seed) -> None:
    outcome = run(draw(seed))
    assert outcome.kind == "dense", f"{draw(seed)}\n{outcome}"


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_most_models_leave_out_rows_and_near_misses_do_not() -> None:
    counts, failures = count(ALL)
    print(*(f"{number} {kind}" for kind, number in sorted(counts.items())), sep="\n")
    assert not failures, "\n\n".join(failures)
    assert counts["padded, sparse"] >= 100
    assert counts["near miss, dense"] >= 50


def test_a_seed_gives_one_model() -> None:
    assert [draw(seed) for seed in ALL] == [draw(seed) for seed in ALL]


def test_the_models_have_each_part() -> None:
    drawn = [draw(seed) for seed in ALL]
    kinds = {kind for model in drawn for kind, _ in model.layers}
    parts = {part for model in drawn for _, names in model.layers for part in names}
    assert kinds == {*ATTENTIONS, "encoder layer"}
    assert parts == {*PARTS}
    assert {model.ending for model in drawn} == {*ENDINGS, *WHOLE_ENDINGS}
    assert {model.miss for model in drawn} == {*MISSES, ""}
    assert {model.keep for model in drawn} == {*KEEPS}
    assert {name for model in drawn for name in model.inputs} == {*EMBEDDINGS}


def test_models_are_drawn_for_each_setting() -> None:
    counts = collections.Counter(draw(seed).sparsity for seed in ALL)
    assert counts.keys() == {"padding", "labels", "auto"}
    assert min(counts.values()) >= 20


def test_a_near_miss_that_leaves_out_rows_is_a_failure() -> None:
    near_miss = next(drawn for drawn in map(draw, ALL) if drawn.reads_all)
    outcome = run(near_miss)
    assert is_as_expected(near_miss, outcome)
    assert not is_as_expected(near_miss, type(outcome)("sparse", ""))
