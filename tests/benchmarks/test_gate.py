"""The gate of the benchmarks, on made-up figures."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STEP = (
    "BERT 8x128, AdamW step, 1 thread: torch2ort {:.2f} of eager, 0.70 of torch.compile "
    "(which is 0.97 of eager)"
)


def gate(text: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Pipe `text` into the gate."""
    command = [sys.executable, str(BENCHMARKS / "gate.py"), *map(str, arguments)]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def kept(text: str, path: Path) -> dict[str, float]:
    """Keep the ratios of `text` in `path`, and return them."""
    gate(text, "--keep", path)
    return json.loads(path.read_text())["ratios"]


@pytest.mark.parametrize(("now", "status"), [(0.50, 0), (0.60, 0), (0.66, 0), (0.67, 1), (0.90, 1)])
def test_a_ratio_that_is_ten_percent_worse_fails(now: float, status: int, tmp_path: Path) -> None:
    kept(STEP.format(0.60), tmp_path / "kept.json")
    assert gate(STEP.format(now), "--kept", tmp_path / "kept.json").returncode == status


def test_the_failure_names_the_ratio(tmp_path: Path) -> None:
    kept(STEP.format(0.60), tmp_path / "kept.json")
    lines = gate(STEP.format(0.75), "--kept", tmp_path / "kept.json").stdout.splitlines()
    assert lines == [
        "WORSE   BERT 8x128, AdamW step, 1 thread: torch2ort of eager: 0.75, kept 0.60 (+25%)",
        "holds   BERT 8x128, AdamW step, 1 thread: torch2ort of torch.compile: 0.70, kept 0.70 (+0%)",
    ]


def test_a_ratio_that_is_not_printed_any_more_fails(tmp_path: Path) -> None:
    kept(STEP.format(0.60) + "\nGuards: ours 0.23 of eager", tmp_path / "kept.json")
    done = gate(STEP.format(0.60), "--kept", tmp_path / "kept.json")
    assert done.returncode == 1
    assert "MISSING Guards: ours of eager: kept 0.23, and nothing was printed" in done.stdout


def test_what_was_not_kept_fails_nothing(tmp_path: Path) -> None:
    kept(STEP.format(0.60), tmp_path / "kept.json")
    done = gate(STEP.format(0.60) + "\nnew: ours 0.23", "--kept", tmp_path / "kept.json")
    assert done.returncode == 0
    assert "not kept new: ours: 0.23" in done.stdout


def test_what_prints_no_ratio_is_an_error() -> None:
    done = gate("nothing here")
    said = "no ratio was printed; pipe what the benchmarks print into the gate"
    assert (done.returncode, done.stderr.strip()) == (1, said)


def test_of_several_rounds_the_median_counts(tmp_path: Path) -> None:
    rounds = "\n".join(f"a: ours {ratio}" for ratio in ("0.90", "0.50", "0.52"))
    assert kept(rounds, tmp_path / "kept.json") == {"a: ours": 0.52}


def test_peers_and_times_are_no_ratios_of_ours(tmp_path: Path) -> None:
    text = (
        "One Function, ratio to eager's apply: PythonOp 0.70, onnxruntime-extensions' PyOp 2.94\n"
        "3 layers 8x64, 1 thread, ratio to eager (87 us): torch2ort 0.80, aot_eager 1.50, inductor 0.90\n"
        "tiny BERT: cold 2.27 s, warm 0.22 s, ratio 10.2 (of CPU time 10.2); eager's first step 0.30 s\n"
    )
    assert kept(text, tmp_path / "kept.json") == {
        "One Function, ratio to eager's apply: PythonOp": 0.70,
        "3 layers 8x64, 1 thread, ratio to eager: torch2ort": 0.80,
    }


def test_the_kept_ratios_are_the_published_ones(tmp_path: Path) -> None:
    # The first block of benchmarks/README.md contains the kept figures.
    text = (BENCHMARKS / "README.md").read_text()
    block = re.search(r"```text\n(.*?)```", text, re.DOTALL).group(1)
    published = kept(block, tmp_path / "kept.json")
    ours = json.loads((BENCHMARKS / "kept.json").read_text())["ratios"]
    assert {name: published.get(name) for name in ours} == ours
