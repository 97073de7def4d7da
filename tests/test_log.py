"""The package's log, by level and by rank, and the messages of libraries that an export suppresses."""

from __future__ import annotations

import bdb
import logging
import os
import subprocess
import sys
import warnings

import pytest
import torch

import torch2ort
from tests.support.functions import Square
from torch2ort import log
from torch2ort.log import DEVINFO, apply_level, logger, onnxruntime_severity, suppress_libraries

RANKS = """
import sys
import torch, torch2ort
import torch.distributed as dist
from torch2ort.support.user_warnings import warn
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=sys.argv[2], rank=int(sys.argv[1]), world_size=2)
for level in ("warning", "info", "devinfo"):
    print(f"--- {level}", file=sys.stderr, flush=True)
    module = torch2ort.ORTModule(torch.nn.Linear(2, 2), options=torch2ort.Options(log_level=level))
    with torch.no_grad():
        module(torch.randn(3, 2))
    warn(f"a warning at {level}")
dist.destroy_process_group()
"""


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x):
        return Square.apply(self.layer(x)).sum()


@pytest.fixture(autouse=True)
def level():
    """Restore the logger's level."""
    before = logger.level
    yield
    logger.setLevel(before)


def test_no_log_level_leaves_the_logger_alone():
    logger.setLevel("ERROR")
    before = logger.handlers[:]
    apply_level(torch2ort.Options())
    assert (logger.level, logger.handlers) == (logging.ERROR, before)


def test_a_log_level_shows_records_where_logging_is_not_set_up(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    apply_level(torch2ort.Options(log_level="info"))
    logger.info("exported")
    logger.debug("detail")
    assert capsys.readouterr().err == "torch2ort [INFO] exported\n"


def test_records_go_to_the_applications_handlers_alone(caplog, capsys):
    apply_level(torch2ort.Options(log_level="debug"))
    logger.debug("detail")
    assert caplog.messages == ["detail"]
    assert capsys.readouterr().err == ""


def test_devinfo_lies_between_debug_and_info(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    apply_level(torch2ort.Options(log_level="DevInfo"))
    logger.log(DEVINFO, "report")
    logger.debug("detail")
    assert capsys.readouterr().err == "torch2ort [DEVINFO] report\n"


@pytest.mark.parametrize(
    ("name", "severity"), [("debug", 0), ("devinfo", 1), ("info", 4), ("warning", 4), ("error", 4)]
)
def test_onnxruntime_speaks_from_devinfo_on(name, severity):
    apply_level(torch2ort.Options(log_level=name))
    assert onnxruntime_severity() == severity


@pytest.mark.parametrize(("name", "shown"), [("info", False), ("devinfo", True)])
def test_other_ranks_speak_to_developers_alone(name, shown, caplog, monkeypatch):
    monkeypatch.setattr(log, "rank", lambda: 1)
    apply_level(torch2ort.Options(log_level=name))
    logger.error("broken")
    assert caplog.messages == ["broken"] * shown


def test_the_records_of_two_ranks(tmp_path):
    address = f"file://{tmp_path / 'meeting'}"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, str(n), address],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TORCH2ORT_CACHE_DIR": ""},
        )
        for n in (0, 1)
    ]
    texts = [rank.communicate(timeout=100)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], texts
    said = [
        [
            [line for line in part.splitlines() if line.startswith("torch2ort [")]
            for part in text.split("--- ")[1:]
        ]
        for text in texts
    ]
    warned = [
        [f"Torch2OrtWarning: a warning at {name}" in text for name in ("warning", "devinfo")]
        for text in texts
    ]
    assert warned == [[True, True], [False, True]]
    assert [[bool(lines) for lines in parts] for parts in said] == [[True, True, True], [False, False, True]]
    assert len(said[0][0]) == 1
    assert said[0][0][0].startswith("torch2ort [WARNING] Linear: ready after ")
    assert "torch2ort [INFO] start-up of Linear" in said[0][1]
    assert "torch2ort [DEVINFO] [rank 1] export of Linear" in said[1][2]


def test_an_export_keeps_out_what_libraries_log(caplog, monkeypatch):
    noisy = logging.getLogger("onnxscript.noise")

    class Noisy(Model):
        def forward(self, x):
            noisy.warning("of a library")
            logging.getLogger("mine").warning("of the model")
            noisy.error("broken")
            return super().forward(x)

    torch2ort.export(Noisy(), torch.randn(2, 3))
    told = [record.getMessage() for record in caplog.records if record.name != "torch2ort"]
    assert set(told) == {"of the model"}


def test_autograds_warning_of_an_error_that_it_then_raises_is_kept_out():
    with warnings.catch_warnings(record=True) as caught, suppress_libraries():
        warnings.simplefilter("default", append=True)
        warnings.warn("Error detected in SinBackward0. Traceback of forward call", UserWarning, stacklevel=1)
        warnings.warn("mine", UserWarning, stacklevel=1)
    assert [str(w.message) for w in caught] == ["mine"]


class Image(torch.nn.Module):
    def forward(self, text, mask, image):
        return text.masked_scatter(mask.unsqueeze(-1), image) * 2


def test_a_try_at_varying_sizes_that_fails_is_silent(caplog, capfd):
    module = torch2ort.ORTModule(Image(), options=torch2ort.Options(log_level="warning"))
    for length in (8, 12):
        mask = (torch.arange(length) < 4).expand(2, length)
        module(torch.randn(2, length, 4, requires_grad=True), mask, torch.randn(8, 4)).sum().backward()
    assert {record.name for record in caplog.records} <= {"torch2ort"}
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("asked", ["info", "devinfo"])
def test_where_code_reads_a_value_the_error_is_all_but_for_developers(asked, capfd):
    class Reads(Model):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x

    with pytest.raises(torch2ort.ExportError, match=r"^Reads: the model's Python code depends on a value"):
        torch2ort.export(Reads(), torch.randn(2, 3), options=torch2ort.Options(log_level=asked))
    said = capfd.readouterr()
    assert said.out == ""
    assert ("def forward(self, arg0_1" in said.err) == (asked == "devinfo")
    assert said.err == "" or asked == "devinfo"


def test_at_devinfo_libraries_are_heard(caplog):
    apply_level(torch2ort.Options(log_level="devinfo"))
    with suppress_libraries():
        logging.getLogger("onnxscript.noise").warning("of a library")
    assert caplog.messages == ["of a library"]


def test_who_asks_torch_for_its_records_gets_them(caplog, monkeypatch):
    monkeypatch.setenv("TORCH_LOGS", "+export")
    with suppress_libraries():
        logging.getLogger("torch.of_ours").warning("asked for")
    assert caplog.messages == ["asked for"]


def test_deprecations_of_libraries_are_kept_out_and_those_of_the_model_are_not():
    with warnings.catch_warnings(record=True) as caught, suppress_libraries():
        warnings.simplefilter("default", append=True)
        warnings.warn_explicit("old", DeprecationWarning, "x.py", 1, module="onnxscript.values")
        warnings.warn_explicit("mine", DeprecationWarning, "y.py", 1, module="mymodel")
    assert [str(w.message) for w in caught] == ["mine"]


def test_the_descriptors_stay_so_that_a_debugger_works_in_forward(capfd):
    class Debugger(bdb.Bdb):
        def user_line(self, frame):
            print("stopped at", frame.f_code.co_name, flush=True)
            self.set_quit()

    class Debugged(Model):
        def forward(self, x):
            debugger = Debugger()
            debugger.set_trace()
            return super().forward(x)

    try:
        torch2ort.export(Debugged(), torch.randn(2, 3))
    except bdb.BdbQuit:
        pass
    finally:
        sys.settrace(None)
    assert "stopped at forward" in capfd.readouterr().out


def test_devinfo_has_the_exporters_report(caplog):
    torch2ort.export(Model(), torch.randn(2, 3), options=torch2ort.Options(log_level="devinfo"))
    report = next(r.getMessage() for r in caplog.records if r.levelno == DEVINFO)
    assert report.startswith("export of Model\n")
    assert "com.microsoft::PythonOp" in report
    assert f"runs {Square.__module__}.Square in Python ({__file__}:" in report


@pytest.mark.parametrize("name", ["torch2ort.ORTModule", "torch2ort.artifacts.TrainingSession"])
def test_importing_it_sets_up_no_logging_of_the_application(name):
    module, _, attribute = name.rpartition(".")
    code = f"import logging; from {module} import {attribute}; print(logging.getLogger().handlers)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout == "[]\n", done.stderr
