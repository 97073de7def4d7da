"""Runs the checks that need a GPU, and prints one table: ``make check-gpu``.

These are the tests marked ``cuda``, the training suite over CUDA tensors, and the benchmarks of a step;
arguments ``marked``, ``suite`` and ``benchmarks`` select some of them. Without a GPU, or without an
onnxruntime for it, the script says so and fails.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
SUITE = ROOT / "tests" / "cuda_suite.txt"
# Files with tests that are marked; each of them runs on the CPU, too.
MARKED = (
    "tests/training/test_cuda_training.py",
    "tests/runtime_ext/test_forward.py",
    "tests/stock/test_cuda.py",
)
PARTS = ("marked", "suite", "benchmarks")
BENCHMARKS = ("gpu_step.py",)
CUDA = "CUDAExecutionProvider"
SECONDS = 3600


class Row(NamedTuple):
    """A line of the table.

    Attributes:
        what: the check.
        passed: whether the whole check passed.
        result: the result in words.
        seconds: duration of the check.
    """

    what: str
    passed: bool
    result: str
    seconds: float


def missing() -> str:
    """Return a sentence about what this machine lacks; ``""`` if it lacks nothing."""
    try:
        # torch first: its CUDA libraries then serve both.
        torch = importlib.import_module("torch")
        onnxruntime = importlib.import_module("onnxruntime")
        importlib.import_module("torch2ort")
        importlib.import_module("pytest")
    except ImportError as error:
        return f"{sys.executable} lacks a package ({error})"
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no GPU"
    available = onnxruntime.get_available_providers()
    if CUDA not in available:
        return (
            f"onnxruntime {onnxruntime.__version__} has {', '.join(available)} and not {CUDA}; install "
            f"onnxruntime-gpu in its place"
        )
    return ""


def counted(report: Path) -> tuple[bool, str]:
    """Return whether a run of pytest passed, and its counts, from its report."""
    if not report.exists():
        return False, "pytest died"
    cases = list(ElementTree.parse(report).iter("testcase"))
    kinds = [{child.tag for child in case} for case in cases]
    failed = sum(bool(kind & {"failure", "error"}) for kind in kinds)
    skipped = sum("skipped" in kind for kind in kinds)
    passed = len(cases) - failed - skipped
    # Tests that are skipped on a GPU prove nothing.
    return passed > 0 and not failed, f"{passed} passed, {failed} failed, {skipped} skipped"


def tested(what: str, arguments: Sequence[str]) -> Row:
    """Return the row of a run of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "--quiet", f"--junitxml={report}", *arguments]
        _, seconds, ended = run(command)
        passed, result = counted(report)
    return Row(what, passed and ended == "", ended or result, seconds)


def benchmark(name: str) -> Row:
    """Return the row of a run of a benchmark."""
    output, seconds, ended = run([sys.executable, str(ROOT / "benchmarks" / name)])
    lines = output.strip().splitlines()[1:]
    return Row(f"benchmarks/{name}", not ended, ended or "; ".join(lines), seconds)


def run(command: Sequence[str]) -> tuple[str, float, str]:
    """Return a command's output, which is also printed, its seconds, and its failure, or ``""``."""
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return "", time.monotonic() - start, f"not done in {SECONDS} s"
    print(done.stdout, flush=True)
    # pytest exits with 1 where a test failed, which its report says.
    is_pytest = "pytest" in command
    ended = (
        ""
        if done.returncode == 0 or (is_pytest and done.returncode == 1)
        else f"ended with {done.returncode}"
    )
    return done.stdout, time.monotonic() - start, ended


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table in Markdown."""
    lines = ["| what | | result | seconds |", "| --- | --- | --- | --- |"]
    for row in rows:
        lines.append(f"| {row.what} | {'good' if row.passed else 'BAD'} | {row.result} | {row.seconds:.0f} |")
    return "\n".join(lines)


def heading() -> str:
    """Return the machine and its versions."""
    torch, onnxruntime = importlib.import_module("torch"), importlib.import_module("onnxruntime")
    return (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, onnxruntime {onnxruntime.__version__}, "
        f"Python {sys.version.split()[0]}"
    )


def main(parts: Sequence[str]) -> int:
    """Run the named parts, all by default, and return the exit status."""
    unknown = sorted({*parts} - {*PARTS})
    if unknown:
        print(f"{unknown[0]} is no part; there are {', '.join(PARTS)}.", file=sys.stderr)
        return 2
    lack = missing()
    if lack:
        print(f"make check-gpu needs a GPU and an onnxruntime for it: {lack}.", file=sys.stderr)
        return 2
    os.chdir(ROOT)
    parts, rows = parts or PARTS, list[Row]()
    if "marked" in parts:
        rows.append(tested("tests marked cuda", ["-m", "cuda", *MARKED]))
    if "suite" in parts:
        files = SUITE.read_text().split()
        rows += [tested(f"{name}, on CUDA tensors", ["--device", "cuda", name]) for name in files]
    if "benchmarks" in parts:
        rows += map(benchmark, BENCHMARKS)
    print(f"\n{heading()}\n\n{table(rows)}")
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
