"""Every operator gives eager's outputs and gradients, or is refused before the first step."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.ops.operators_doc import page
from tests.ops.snippets import GROUPS, TORCH_2_11
from tests.ops.sweep import Outcome, run, sweep

PAGE = Path(__file__).parents[2] / "docs" / "operators.md"

# torch.export cannot trace these: the size or the path of the computation depends on values in a tensor.
UNTRACEABLE = {"cov", "gaussian_nll_loss", "ctc_loss", *(["quantile"] if TORCH_2_11 else [])}
REFUSED = {"fft", "complex", "stft"}


@functools.cache
def outcomes(group: str) -> dict[str, Outcome]:
    return sweep(GROUPS[group])


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("group", "name"), [pytest.param(g, n, id=n) for g, snippets in GROUPS.items() for n in snippets]
)
def test_snippet_is_equal_to_eager_or_refused(group: str, name: str) -> None:
    outcome = outcomes(group)[name]
    expected = "refused" if name in UNTRACEABLE | REFUSED else "equal"
    assert (outcome.state, outcome.detail) == (expected, outcome.detail if expected == "refused" else "")


def test_a_name_stands_for_one_snippet() -> None:
    names = [name for snippets in GROUPS.values() for name in snippets]
    assert sorted(names) == sorted(set(names))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_page_says_what_the_sweep_finds() -> None:
    found = {g: {n: run({n: s}) for n, s in snippets.items()} for g, snippets in GROUPS.items()}
    assert PAGE.read_text() == page(found)


def test_the_page_names_every_snippet() -> None:
    rows = {
        line.split(" | ")[0].removeprefix("| ") for line in PAGE.read_text().splitlines() if " | " in line
    }
    assert {name for snippets in GROUPS.values() for name in snippets} <= rows
