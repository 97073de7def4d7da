"""Where code is installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torch2ort.support import install_paths


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with a file, links to it and to folders above it."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "code.py").touch()
    (tmp_path / "link.py").symlink_to("a/b/code.py")
    (tmp_path / "direct").symlink_to("a/b")
    (tmp_path / "above").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "twice").symlink_to("../direct")
    return tmp_path


@pytest.mark.parametrize(
    "path",
    [
        "a/b/code.py",
        "link.py",
        "direct/code.py",
        "above/b/code.py",
        "above/twice/code.py",
        "direct/../b/code.py",
    ],
)
def test_a_path_is_followed_through_links_in_any_part_of_it(tree: Path, path: str) -> None:
    assert install_paths.real_path(str(tree / path)) == os.path.realpath(tree / "a" / "b" / "code.py")
