"""The examples run, from a few steps on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_char_transformer_trains_exports_and_reloads(tmp_path: Path) -> None:
    small = ["--steps=3", "--batch=2", "--context=16", "--width=32", "--layers=1", "--heads=2"]
    script = ROOT / "examples" / "char_transformer.py"
    run = subprocess.run(
        [sys.executable, script, *small, "--output", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert run.returncode == 0, run.stderr
    assert "  __main__.SwiGLU, 1 calls\n" in run.stdout
    assert "  entmax.activations.Entmax15Function, 1 calls\n" in run.stdout
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
