"""Every test starts without entries of its own kind and leaves none behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import torch2ort


@pytest.fixture(autouse=True)
def _no_entries_left() -> Iterator[None]:
    before = set(torch2ort.registered())
    yield
    for name in set(torch2ort.registered()) - before:
        torch2ort.unregister(name)
