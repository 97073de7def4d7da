"""The examples run, from a few steps on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("more", [(), pytest.param(("--autocast",), marks=pytest.mark.long)])
def test_the_char_transformer_trains_exports_and_reloads(more, tmp_path: Path) -> None:
    small = ["--steps=3", "--batch=2", "--context=16", "--width=32", "--layers=1", "--heads=2", *more]
    script = ROOT / "examples" / "char_transformer.py"
    run = subprocess.run(
        [sys.executable, script, *small, "--output", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert run.returncode == 0, run.stderr
    assert "  char_model.SwiGLU, 1 calls\n" in run.stdout
    assert "  entmax.activations.Entmax15Function, 1 calls\n" in run.stdout
    assert "Served by a plain onnxruntime session: largest difference of a logit " in run.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"char_transformer.onnx", "char_transformer.png"}


def test_the_trainer_s_example_resumes_saves_and_writes(tmp_path: Path) -> None:
    small = ["--steps=4", "--batch=2", "--context=4", "--width=4"]
    script = ROOT / "examples" / "orttrainer_text.py"
    run = subprocess.run(
        [sys.executable, script, *small, "--output", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert run.returncode == 0, run.stderr
    assert " in 4 calls.\n" in run.stdout
    written = {f"orttrainer_text.{kind}" for kind in ("checkpoint", "onnx", "png")}
    assert {path.name for path in tmp_path.iterdir()} == written


def test_the_portable_file_runs_by_bodies_a_kernel_and_its_class() -> None:
    lines = run_small("portable_kernel/serve").splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "body, any runtime",
        "compiled kernel",
        "class, in Python",
        "the kernel ran 303 times",
    ]


def run_small(name: str, *arguments: object) -> str:
    """Return the output of an example with ``arguments``."""
    run = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.long
def test_the_trainer_finetunes_as_in_eager(tmp_path: Path) -> None:
    small = ["--steps=6", "--batch=2", "--length=16", "--width=16", "--layers=1"]
    printed = run_small("finetune_with_trainer", *small, "--output", tmp_path)
    assert float(printed.partition("Largest difference: ")[2].split()[0]) < 1e-4
    assert [path.name for path in tmp_path.iterdir()] == ["finetune_with_trainer.png"]


@pytest.mark.long
def test_padded_batches_train_as_in_eager() -> None:
    printed = run_small("padded_batches", "--characters=4000", "--batch=8", "--width=16", "--layers=1")
    assert float(printed.partition("Largest difference: ")[2].split()[0]) < 1e-4
    assert [line.split()[0] for line in printed.splitlines()] == ["Loss:", "Second", "tokens", "labels"]


@pytest.mark.long
def test_a_quantised_lightning_module_trains_as_in_eager() -> None:
    printed = run_small("lightning_quantised", "--epochs=1", "--rows=640")
    assert "Functions in the graph: __main__.Quantise, __main__.Quantise\n" in printed
    assert float(printed.partition("they differ by ")[2].split()[0]) < 1e-4


@pytest.mark.long
def test_two_processes_train_as_in_eager(tmp_path: Path) -> None:
    printed = run_small("two_processes", "--steps=6", "--hidden=8", "--output", tmp_path)
    assert "Functions in the graph of each process: __mp_main__.Copy, __mp_main__.Reduce\n" in printed
    assert float(printed.partition("Largest difference: ")[2].split()[0]) < 1e-4
    assert [path.name for path in tmp_path.iterdir()] == ["two_processes.png"]
