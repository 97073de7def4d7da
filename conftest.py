"""Tests and the examples of the docs do not use the user's export cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from torch2ort.cache.store import location


@pytest.fixture(autouse=True, scope="session")
def _without_the_users_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Disable the cache in this process, unless a folder is named; child processes get a folder."""
    folder = tmp_path_factory.mktemp("cache_of_children")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(location, "users_folder", lambda: None)
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder
