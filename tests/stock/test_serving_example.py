"""The example that serves a file runs on any onnxruntime."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve_plain_session.py"


def test_a_plain_session_serves_any_batch_size() -> None:
    run = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert [line.partition(", to ")[0] for line in run.stdout.splitlines()[1:]] == [
        "1 rows: as eager PyTorch",
        "4 rows: as eager PyTorch",
        "64 rows: as eager PyTorch",
    ]
