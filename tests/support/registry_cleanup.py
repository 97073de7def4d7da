"""Registrations that a test makes end with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import torch2ort


@pytest.fixture(autouse=True)
def no_entries_left() -> Iterator[None]:
    """Every test starts without entries of its own kind and leaves none behind."""
    before = set(torch2ort.registered())
    yield
    for name in set(torch2ort.registered()) - before:
        torch2ort.unregister(name)
