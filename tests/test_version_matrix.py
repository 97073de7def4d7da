"""The matrix of versions: its search for Pythons, and rows that cannot be tested or fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import version_matrix
from tests.version_matrix import Result, Row, interpreter, table

THIS = ".".join(map(str, sys.version_info[:2]))


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A PATH of two folders, in a home folder without a version manager."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    monkeypatch.setenv("PATH", ":".join(map(str, folders)))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    return folders


def script(file: Path, line: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{line}\n")
    file.chmod(0o755)


def test_a_name_that_does_not_run_is_passed_over(path):
    script(path[0] / f"python{THIS}", "echo 'no such version' >&2; exit 127")
    script(path[1] / f"python{THIS}", f'exec {sys.executable} "$@"')
    assert interpreter(THIS) == str(path[1] / f"python{THIS}")


def test_a_python_of_another_version_is_passed_over(path):
    script(path[0] / "python3.99", f'exec {sys.executable} "$@"')
    assert interpreter("3.99") is None


def test_a_python_that_the_version_manager_keeps_to_itself_is_found(path):
    own = path[0].parent / "pyenv" / "versions" / f"{THIS}.1" / "bin" / "python"
    script(own, f'exec {sys.executable} "$@"')
    assert interpreter(THIS) == str(own)


def test_the_rows_run_tests_that_are_there():
    named = [name.removeprefix("--ignore=") for name in (*version_matrix.SUITE, *version_matrix.FIRST)]
    assert [name for name in named if not (version_matrix.ROOT / name).exists()] == []


def test_no_two_rows_share_an_environment():
    names = [row.name for row in (*version_matrix.MATRIX, *version_matrix.NEWEST)]
    assert sorted(set(names)) == sorted(names)


def test_constraints_leave_a_row_its_own_versions():
    named = {line.partition("==")[0] for line in version_matrix._constraints()}
    assert "numpy" in named
    assert named.isdisjoint(version_matrix.VARYING)


def test_a_row_without_its_python_is_not_tried_and_no_failure(path):
    result = version_matrix.try_row(Row("3.99", "==2.13.0", "onnxruntime"), Path("a.whl"), keep=False)
    assert result == Result("3.99", "2.13.0", "onnxruntime", "not tried: no such Python here")
    assert not result.failed


@pytest.mark.parametrize(
    ("status", "last", "outcome", "failed"),
    [
        (0, "12 passed, 3 skipped, 1 warning in 4.56s", "12 passed, 3 skipped", False),
        (0, "12 passed in 4.56s\na library: leaked 4 instances!", "12 passed", False),
        (1, "2 failed, 12 passed, 1 error in 4.56s", "12 passed, 2 failed, 1 error", True),
        (1, "2 failed in 4.56s", "2 failed", True),
        (2, "1 error in 1.95s", "broken off with status 2: 1 error in 1.95s", True),
        (
            124,
            "ERROR: ended after 9 seconds",
            "broken off with status 124: ERROR: ended after 9 seconds",
            True,
        ),
    ],
)
def test_an_outcome_is_read_out_of_pytests_closing_line(status, last, outcome, failed):
    done = subprocess.CompletedProcess([], status, f"...F..\n\n{last}\n")
    assert version_matrix._outcome(done) == outcome
    assert Result("3.11", "2.13.0", "onnxruntime", outcome).failed == failed


def test_a_command_that_hangs_is_ended():
    done = version_matrix._run([sys.executable, "-c", "import time; time.sleep(60)"], limit=1)
    assert done.returncode == 124
    assert done.stdout.endswith("ERROR: ended after 1 seconds")


def test_rows_that_came_to_the_same_versions_are_one_line():
    tried = Result("3.12", "2.15.0", "onnxruntime 1.31.1", "9 passed")
    missing = Result("3.14", "", "onnxruntime", "not tried: no such Python here")
    assert table([tried, tried, missing]) == (
        "| Python | torch | ONNX Runtime | tests |\n"
        "| --- | --- | --- | --- |\n"
        "| 3.12 | 2.15.0 | onnxruntime 1.31.1 | 9 passed |\n"
        "| 3.14 | newest | onnxruntime | not tried: no such Python here |"
    )
