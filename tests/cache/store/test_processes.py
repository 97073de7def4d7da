"""The cache between processes: correct results whatever happens to the other processes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cache.model_source import SOURCE, changed
from torch2ort.cache.store.store import Store

ROOT = Path(__file__).parents[3]


def start(cache: Path, model: str, file: Path | None = None, **environment: str) -> subprocess.Popen[str]:
    """A process that trains ``model``, or the one of a source file, with the cache."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.cache.training_process", model, *([str(file)] if file else [])],
        cwd=ROOT,
        env={**os.environ, "TORCH2ORT_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return a process's report, after a check of its losses against eager PyTorch's."""
    output, _ = process.communicate(timeout=110)
    assert process.returncode == 0
    found = json.loads(output.splitlines()[-1])
    assert found["losses"] == pytest.approx(found["eager"], rel=1e-4, abs=1e-5)
    return found


def run(cache: Path, model: str, file: Path | None = None, **environment: str) -> dict[str, Any]:
    return finish(start(cache, model, file, **environment))


@pytest.mark.long
def test_a_second_process_exports_nothing(tmp_path):
    first = run(tmp_path / "cache", "mlp", PYTHONHASHSEED="1")
    second = run(tmp_path / "cache", "mlp", PYTHONHASHSEED="2", NO_EXPORT="1")
    assert (first["hit"], second["hit"]) == (False, True)
    assert second["losses"] == first["losses"]
    assert first["warnings"] == second["warnings"] == []


@pytest.mark.long
@pytest.mark.parametrize("model", ["bert", "conv", "demo"])
def test_a_second_process_of_a_larger_model_exports_nothing(tmp_path, model):
    first = run(tmp_path / "cache", model)
    second = run(tmp_path / "cache", model, NO_EXPORT="1")
    assert (first["hit"], second["hit"]) == (False, True)
    assert second["losses"] == pytest.approx(first["losses"], rel=1e-6)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds what one process exported of the source."""
    folder = tmp_path_factory.mktemp("filled")
    file = folder / "net.py"
    file.write_text(SOURCE)
    assert not run(folder / "cache", "source", file)["hit"]
    assert run(folder / "cache", "source", file)["hit"]
    return folder / "cache"


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("h = helper(self.first(x))", "h = 2 * helper(self.first(x))", id="forward"),
        pytest.param("self.gain = 0.75", "self.gain = 0.5", id="attribute"),
        pytest.param("return x * x * bias()", "return x * x * 3.0 * bias()", id="forward of a Function"),
        pytest.param("return 2.0 * x * grad", "return 3.0 * x * grad", id="backward of a Function"),
        pytest.param("return x + 1.5", "return x + 1.25", id="helper of a helper"),
        pytest.param("return 1.0\n", "return 1.5\n", id="helper of a Function"),
        pytest.param("SCALE = 2.0", "SCALE = 2.5", id="global"),
        pytest.param("made(0.25)", "made(0.5)", id="closure"),
        pytest.param("torch.nn.Linear(4, 2)", "torch.nn.Linear(4, 2, bias=False)", id="structure"),
        pytest.param("return Net()", "return Net().eval()", id="mode"),
        pytest.param("return Net()", "return Net().requires_grad_(False)", id="requires_grad"),
    ],
)
def test_another_source_in_another_process_is_no_hit(filled, tmp_path, before, after):
    file = tmp_path / "net.py"
    file.write_text(changed(before, after))
    assert not run(filled, "source", file)["hit"]


@pytest.mark.long
def test_other_parameter_values_in_another_process_are_a_hit(filled, tmp_path):
    file = tmp_path / "net.py"
    file.write_text(changed("torch.manual_seed(1)", "torch.manual_seed(2)"))
    assert run(filled, "source", file)["hit"]


@pytest.mark.long
def test_eight_processes_at_once_export_once(tmp_path):
    processes = [start(tmp_path / "cache", "mlp", RANK=str(rank)) for rank in range(8)]
    found = [finish(process) for process in processes]
    assert sum(not each["hit"] for each in found) == 1
    assert all(each["losses"] == found[0]["losses"] for each in found)
    assert all(each["warnings"] == [] for each in found)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_start_that_is_killed_harms_nobody(tmp_path):
    chance = random.Random(1)
    began = time.monotonic()
    run(tmp_path / "whole", "mlp")
    duration = time.monotonic() - began
    for _ in range(12):
        process = start(tmp_path / "cache", "mlp")
        time.sleep(duration * chance.uniform(0.5, 1.0))  # imports take the first half
        process.send_signal(signal.SIGKILL)
        process.communicate()
    for hit in (None, True):
        found = run(tmp_path / "cache", "mlp")
        assert found["warnings"] == []
        assert hit is None or found["hit"]


@pytest.mark.long
def test_a_full_disk_keeps_nothing(tmp_path):
    found = run(tmp_path / "cache", "mlp", FULL_DISK="1")
    assert not found["hit"]
    assert found["warnings"] == []
    assert found["bypass"].startswith("the export cache could not be written")
    assert Store(tmp_path / "cache").list_entries() == []


@pytest.mark.long
def test_a_folder_that_is_only_read(tmp_path):
    cache = tmp_path / "cache"
    run(cache, "mlp")
    (cache / "v1").chmod(0o500)
    try:
        known, unknown = (run(cache, model, NO_PRIVILEGES="1") for model in ("mlp", "conv"))
    finally:
        (cache / "v1").chmod(0o700)
    assert (known["hit"], unknown["hit"]) == (True, False)
    assert known["warnings"] == []
    assert unknown["warnings"] == []
    assert unknown["bypass"].startswith("the export cache could not be written")
