"""The small examples run on any onnxruntime, and train as eager PyTorch does."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the output of an example, run in this process, which has imported torch already."""
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("quantisation", "values that the first layer's 256 weights have: "),
        ("sparse_attention", "attention weights that are 0: "),
        ("surrogate_gradients", "neurons fire in "),
        ("reversible_layers", "6 layers are one node, PythonOp_0, which keeps two activations"),
        ("lora", "trained 352 of 1160 numbers; the frozen ones are as before: True"),
    ],
)
def test_an_example_trains_as_in_eager(name: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(name, capsys)
    assert float(out.partition("largest difference of a loss: ")[2].split()[0]) < 1e-4
    assert any(found.startswith(line) for found in out.splitlines())


def test_a_handler_maps_what_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed("handler", capsys).splitlines()
    assert lines[0] == "with the handler:    Gemm HardSigmoid Mul PythonOp Mul"
    assert lines[-1] == "without the handler: Gemm PythonOp Mul PythonOp Mul"
    assert all(float(line.split()[1]) < 1e-5 for line in lines[1:3])


def test_the_list_names_every_example() -> None:
    page = (EXAMPLES / "README.md").read_text()
    assert [path.name for path in EXAMPLES.glob("*.py") if f"]({path.name})" not in page] == []


def run(name: str) -> list[str]:
    """Return the lines that an example prints in a process of its own."""
    command = [sys.executable, EXAMPLES / f"{name}.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.long
def test_the_second_process_reads_what_the_first_one_exported() -> None:
    first, second, *_ = run("cache_two_processes")
    assert first.startswith("first process: exported in ")
    assert second.startswith("second process: read out of the cache in ")
    assert first.partition("; ")[2] == second.partition("; ")[2]


def test_a_plain_session_serves_any_batch_size() -> None:
    assert [line.partition(", to ")[0] for line in run("serve_plain_session")[1:]] == [
        "1 rows: as eager PyTorch",
        "4 rows: as eager PyTorch",
        "64 rows: as eager PyTorch",
    ]
