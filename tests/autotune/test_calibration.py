"""The library that computes an operator: measured on this machine, else set by the rule that ships."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import torch2ort
from torch2ort.__main__ import main
from torch2ort.autotune import calibration, hardware_key, microbenchmark, tuner, typical_operators
from torch2ort.autotune.microbenchmark import RULE
from torch2ort.autotune.processor_rule import KINDS
from torch2ort.cache.store import location
from torch2ort.options import Options

RATIOS = dict(zip(KINDS, (0.9, 1.2, 0.5, 1.5, 1.0), strict=True))
RULED = KINDS["convolutions"] | KINDS["sums"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder of a machine that was never calibrated, whose rule has two kinds."""
    monkeypatch.setattr(location, "users_folder", lambda: tmp_path / "torch2ort")
    monkeypatch.setattr(calibration, "faster_in_kernels", lambda: RULED)
    monkeypatch.setattr(tuner, "_KNOWN", tuner._Known())
    return tmp_path / "torch2ort" / "calibration"


def test_the_rule_holds_on_a_machine_that_was_not_calibrated():
    assert calibration.in_kernels(Options()) == RULED
    assert calibration.runs(Options()) == 0


def test_kernels_compute_the_kinds_that_were_measured_to_be_faster_there():
    calibration.note(Options(), RATIOS)
    # Sums took the same time in both libraries, so the rule holds.
    assert calibration.in_kernels(Options()) == KINDS["products"] | KINDS["GELU"] | KINDS["sums"]


def test_the_last_of_several_runs_decides():
    calibration.note(Options(), RATIOS)
    calibration.note(Options(), dict.fromkeys(KINDS, 2.0))
    assert calibration.in_kernels(Options()) == frozenset()
    assert calibration.runs(Options()) == 2


@pytest.mark.parametrize("setting", [{"calibrate": False}, {"deterministic": True}, {"cache_dir": False}])
def test_settings_keep_to_the_rule(setting):
    calibration.note(Options(), RATIOS)
    assert calibration.in_kernels(Options(**setting)) == RULED


@pytest.mark.parametrize("other", ["processor", "threads"])
def test_another_machine_follows_its_rule(other, monkeypatch):
    calibration.note(Options(), RATIOS)
    if other == "processor":
        monkeypatch.setattr(hardware_key, "processor_name", lambda: "another one")
    options = Options(intra_op_threads=7 if other == "threads" else None)
    assert calibration.in_kernels(options) == RULED


def test_a_folder_that_cannot_be_made_leaves_the_rule(folder):
    folder.parent.write_text("a file")
    assert calibration.note(Options(), RATIOS) is None
    assert calibration.in_kernels(Options()) == RULED


def test_a_calibration_is_no_part_of_the_export_cache(tmp_path, folder):
    calibration.note(Options(cache_dir=tmp_path / "exports"), RATIOS)
    assert folder.is_dir()
    assert not list((tmp_path / "exports").rglob("*"))


def test_the_command_prints_what_it_measured_and_keeps_it(capsys, monkeypatch):
    monkeypatch.setattr(typical_operators, "ratios", lambda options: RATIOS)
    assert main(["calibrate"]) == 0
    measured = capsys.readouterr().out
    head, *rows = measured.splitlines()
    assert re.search(r"torch \d.*, onnxruntime \d.*, 1 thread\(s\), run 1$", head)
    assert rows == [
        "operators        PyTorch / ONNX Runtime  library",
        "products                           0.90  PyTorch",
        "convolutions                       1.20  ONNX Runtime",
        "GELU                               0.50  PyTorch",
        "softmax                            1.50  ONNX Runtime",
        "sums                               1.00  PyTorch",
    ]
    assert main(["calibrate", "--show"]) == 0
    assert capsys.readouterr().out == measured


def test_showing_what_was_never_measured_is_refused(capsys):
    assert main(["calibrate", "--show"]) == 1
    assert capsys.readouterr().err == (
        "error: no calibration is stored for this processor, these versions and threads; measure one with "
        "python -m torch2ort calibrate\n"
    )


def test_a_command_that_can_keep_nothing_says_so(capsys, monkeypatch):
    monkeypatch.setattr(typical_operators, "ratios", lambda options: RATIOS)
    monkeypatch.setenv("TORCH2ORT_CACHE_DIR", "")
    assert main(["calibrate"]) == 1
    assert capsys.readouterr().err.startswith(
        "error: the calibration is not stored, as there is no cache folder"
    )


def test_typical_operators_of_each_kind_are_timed_in_both_libraries():
    found = typical_operators.ratios(Options(), 0.0)
    assert found.keys() == KINDS.keys()
    assert all(0.01 < ratio < 100 for ratio in found.values())


# --- starts


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The alternatives that are measured; the rule's is the slowest, and any start has time to measure."""
    seen: list[str] = []

    def time_of(found, clock, most):
        seen.extend(found)
        return {way: 1.0 if way.startswith(RULE) else 0.5 for way in found}

    monkeypatch.setattr(microbenchmark, "interleaved", time_of)
    monkeypatch.setattr(microbenchmark, "_RUNS", 0)
    monkeypatch.setattr("torch2ort.training.plan_cache._PART", 1000.0)
    monkeypatch.setattr(tuner, "LARGE", 0)
    return seen


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    result = model(x)
    result.square().sum().backward()
    return [result.detach(), *(p.grad for p in model.parameters())]


def products(module: torch2ort.ORTModule, x: torch.Tensor) -> set[str]:
    """Names of PyTorch's kernels that a step runs."""
    step(module, x)
    with module.profile(1) as taken:
        step(module, x)
    return {row.name for row in taken.functions}


def test_a_start_keeps_what_it_measures(measured, folder, tmp_path):
    model, x = nn.Linear(8, 6), torch.randn(4, 8)
    module = torch2ort.ORTModule(copy.deepcopy(model), options=Options(cache_dir=tmp_path / "exports"))
    torch.testing.assert_close(step(module, x), step(model, x))
    assert "kernel" in measured
    kept = {p.name for p in folder.rglob("manifest.json")}
    assert kept
    measured.clear()
    tuner._KNOWN.seconds.clear()
    other = torch2ort.ORTModule(copy.deepcopy(model), options=Options(cache_dir=tmp_path / "others"))
    assert "torch.ops.aten.addmm" in products(other, x)
    assert measured == []


def test_a_start_without_time_follows_the_rule(measured, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("torch2ort.training.plan_cache._PART", 0.0)
    module = torch2ort.ORTModule(nn.Linear(8, 6), options=Options(cache_dir=tmp_path / "exports"))
    assert products(module, torch.randn(4, 8)) == set()
    assert measured == []


@pytest.mark.parametrize("setting", [{"calibrate": False}, {"deterministic": True}, {"cache_dir": False}])
def test_settings_keep_starts_from_measuring(setting, measured, tmp_path):
    options = Options(**{"cache_dir": tmp_path / "exports", **setting})
    step(torch2ort.ORTModule(nn.Linear(8, 6), options=options), torch.randn(4, 8))
    assert measured == []


def test_an_entry_keeps_the_decisions_that_it_was_built_with(measured, folder, tmp_path):
    model, x = nn.Linear(8, 6), torch.randn(4, 8)
    options = Options(cache_dir=tmp_path / "exports")
    step(torch2ort.ORTModule(copy.deepcopy(model), options=options), x)
    # Single measurements are not part of an entry's key.
    calibration.calibration_store(options).clear()
    tuner._KNOWN.seconds.clear()
    measured.clear()
    assert "torch.ops.aten.addmm" in products(torch2ort.ORTModule(copy.deepcopy(model), options=options), x)
    assert measured == []


def test_a_new_calibration_makes_new_entries(measured, tmp_path):
    model, x = nn.Linear(8, 6), torch.randn(4, 8)
    options = Options(cache_dir=tmp_path / "exports")
    step(torch2ort.ORTModule(copy.deepcopy(model), options=options), x)
    measured.clear()
    tuner._KNOWN.seconds.clear()
    calibration.calibration_store(options).clear()
    calibration.note(options, dict.fromkeys(KINDS, 2.0))
    step(torch2ort.ORTModule(copy.deepcopy(model), options=options), x)
    assert "kernel" in measured
