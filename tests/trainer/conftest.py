"""Trainers of one model export it once."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the export cache."""
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(autouse=True)
def _kept_exports(_same_start: None, exports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep exports, behind the fixture that hides the caller's settings."""
    monkeypatch.setenv("TORCH2ORT_CACHE_DIR", str(exports))
