"""Checks that hold for all tests of packed steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from torch2ort.training.row_plans import RowPlans


@pytest.fixture(autouse=True)
def _no_plan_differs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail a test in which a packed step differs from the dense one: the analysis must refuse it itself."""
    caplog.set_level(logging.INFO, "torch2ort")
    yield
    texts = [record.getMessage() for record in caplog.get_records("call")]
    assert not [text for text in texts if "is not used" in text]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[RowPlans]:
    """Collect the choices between steps that modules make, in order."""
    found: list[RowPlans] = []
    original = RowPlans.__init__

    def noted(self, *args, **kwargs):
        original(self, *args, **kwargs)
        found.append(self)

    monkeypatch.setattr(RowPlans, "__init__", noted)
    return found
