"""Sweeps over similar cases: a few run in `make test`, all of them in `make test-long`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def sample_cases(cases: Iterable[object], every: int, start: int = 0) -> list[object]:
    """Mark all cases but every n-th as ``long``.

    Args:
        cases: cases for ``pytest.mark.parametrize``; a tuple has several arguments.
        every: one of so many cases runs.
        start: the first case that runs, so that a second sweep over the same cases selects others.
    """
    return [
        case
        if i % every == start
        else pytest.param(*case if isinstance(case, tuple) else (case,), marks=pytest.mark.long)
        for i, case in enumerate(cases)
    ]
