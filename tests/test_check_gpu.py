"""``make check-gpu``: without a GPU it says so and fails; the tests that it would run exist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import check_gpu

ROOT = check_gpu.ROOT


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_fails() -> None:
    command = [sys.executable, str(ROOT / "tests" / "check_gpu.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    # A PyTorch built for CUDA may say by itself that it found no GPU.
    assert done.stderr.splitlines()[-1] == (
        f"make check-gpu needs a GPU and an onnxruntime for it: PyTorch {torch.__version__} sees no GPU."
    )


def test_an_onnxruntime_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert check_gpu.missing().endswith("and not CUDAExecutionProvider; install onnxruntime-gpu in its place")


def test_an_unknown_part_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_gpu.main(["all"]) == 2
    assert capsys.readouterr().err == "all is no part; there are marked, suite, benchmarks.\n"


def test_what_it_runs_is_there() -> None:
    for name in (*check_gpu.SUITE.read_text().split(), *check_gpu.MARKED):
        assert (ROOT / name).is_file(), name
    for name in check_gpu.BENCHMARKS:
        assert (ROOT / "benchmarks" / name).is_file(), name


def test_every_file_with_marked_tests_is_run() -> None:
    mark = "pytest.mark." + "cuda"
    files = {
        path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "tests").rglob("test_*.py")
    }
    assert {name for name, text in files.items() if mark in text} == {*check_gpu.MARKED}


@pytest.mark.parametrize(
    ("cases", "passed", "result"),
    [
        ("<testcase/><testcase><skipped/></testcase>", True, "1 passed, 0 failed, 1 skipped"),
        ("<testcase/><testcase><failure/></testcase>", False, "1 passed, 1 failed, 0 skipped"),
        ("<testcase><error/></testcase>", False, "0 passed, 1 failed, 0 skipped"),
        ("<testcase><skipped/></testcase>", False, "0 passed, 0 failed, 1 skipped"),
        ("", False, "0 passed, 0 failed, 0 skipped"),
    ],
)
def test_a_run_that_shows_nothing_is_not_good(tmp_path: Path, cases: str, passed: bool, result: str) -> None:
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert check_gpu.counted(report) == (passed, result)


def test_a_run_that_dies_is_not_good(tmp_path: Path) -> None:
    assert check_gpu.counted(tmp_path / "report.xml") == (False, "pytest died")


def test_all_rows_stand_in_one_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str]) -> tuple[str, float, str]:
        commands.append(command)
        for part in command:
            if part.startswith("--junitxml="):
                Path(part.partition("=")[2]).write_text("<testsuite><testcase/></testsuite>")
        return "on a machine\na model, training step: 0.50 of eager\n", 3.2, ""

    def heading() -> str:
        return "a GPU"

    replaced: dict[str, Any] = {"run": run, "missing": lambda: "", "heading": heading}
    for name, function in replaced.items():
        monkeypatch.setattr(check_gpu, name, function)
    assert check_gpu.main([]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0] == "a GPU"
    assert "| tests marked cuda | good | 1 passed, 0 failed, 0 skipped | 3 |" in lines
    assert "| tests/test_module.py, on CUDA tensors | good | 1 passed, 0 failed, 0 skipped | 3 |" in lines
    assert lines[-1] == "| benchmarks/gpu_step.py | good | a model, training step: 0.50 of eager | 3 |"
    assert sum("--device" in command for command in commands) == len(check_gpu.SUITE.read_text().split())
