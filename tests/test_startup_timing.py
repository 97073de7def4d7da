"""The time of a model's start is measured by phase, reported at the end and shown on a terminal."""

from __future__ import annotations

import io
import logging
import sys
import threading
import time

import pytest
import torch

import torch2ort
from tests.support.functions import Square
from torch2ort.log import logger
from torch2ort.support import progress, startup_timing
from torch2ort.support.startup_timing import PHASES, Startup, phase


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x):
        return Square.apply(self.layer(x)).sum()


class Clock:
    """A clock that only advances on request."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(startup_timing, "time", clock)
    return clock


@pytest.fixture(scope="module")
def started():
    """A module after one step, its records, and the seconds that the step took."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logger.addHandler(handler)
    level = logger.level
    module = torch2ort.ORTModule(Model(), options=torch2ort.Options(log_level="info"))
    before = dict(module.startup)
    begin = time.perf_counter()
    module(torch.randn(2, 3)).backward()
    seconds = time.perf_counter() - begin
    logger.removeHandler(handler)
    logger.setLevel(level)
    return module, before, records, seconds


def test_there_is_nothing_before_the_first_call(started):
    assert started[1] == {}


def test_the_phases_are_these_in_this_order(started):
    names = [
        "cache look-up",
        "imports",
        "trace",
        "translate",
        "shapes",
        "differentiate",
        "session",
        "first run",
    ]
    assert list(started[0].startup) == names == list(PHASES)


def test_each_phase_of_an_export_took_time(started):
    seconds = started[0].startup
    assert seconds.pop("cache look-up") >= 0
    # The export of the whole model's graph, which has not been requested.
    assert seconds.pop("shapes") == 0
    assert all(s > 0 for s in seconds.values())


def test_the_phases_add_up_to_what_was_waited_for(started):
    total = sum(started[0].startup.values())
    assert 0.5 * started[3] < total <= started[3]


def test_one_line_at_warning_has_total_and_export(started):
    (record,) = [r for r in started[2] if r.levelno == logging.WARNING]
    seconds = started[0].startup
    export = sum(seconds[name] for name in ("cache look-up", "imports", "trace", "translate", "shapes"))
    expected = f"Model: ready after {sum(seconds.values()):.2f} s (export {export:.2f} s)"
    assert record.getMessage() == expected


def test_info_adds_a_table(started):
    (text,) = [m for m in (r.getMessage() for r in started[2]) if m.startswith("start-up of Model\n")]
    lines = text.splitlines()
    assert lines[1].split() == ["phase", "seconds", "share"]
    assert [line[2:16].strip() for line in lines[2:]] == [*PHASES, "total"]


def test_a_second_call_adds_nothing(started):
    before = dict(started[0].startup)
    started[0](torch.randn(2, 3)).backward()
    assert started[0].startup == before


def test_what_is_returned_is_a_copy(started):
    started[0].startup.clear()
    assert started[0].startup


def test_a_cached_start_traces_nothing(tmp_path):
    for _ in range(2):
        module = torch2ort.ORTModule(Model(), options=torch2ort.Options(cache_dir=tmp_path))
        module(torch.randn(2, 3)).backward()
    assert (module.startup["trace"], module.startup["translate"]) == (pytest.approx(0, abs=0.05), 0)
    assert module.startup["cache look-up"] > 0


def test_a_models_own_attribute_goes_first():
    model = Model()
    model.startup = "mine"
    assert torch2ort.ORTModule(model).startup == "mine"


def test_a_phase_inside_of_another_one_interrupts_it(clock):
    start = Startup("M")
    with start.recording("trace"):
        clock.now += 1
        with phase("shapes"):
            clock.now += 10
        clock.now += 2
    assert (start.seconds["trace"], start.seconds["shapes"]) == (3, 10)


def test_a_phase_that_raises_counts_too(clock):
    start = Startup("M")

    def failing():
        with start.recording("trace"), phase("session"):
            clock.now += 1
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        failing()
    assert start.seconds["session"] == 1


def test_a_phase_outside_of_a_start_is_not_counted():
    with phase("trace"):
        assert startup_timing.current() is None


def test_a_module_that_starts_inside_of_anothers_start_has_its_own_seconds(clock):
    outer, inner = Startup("outer"), Startup("inner")
    with outer.recording("first run"), inner.recording("trace"):
        clock.now += 1
    assert (outer.seconds["first run"], inner.seconds["trace"], inner.seconds["first run"]) == (1, 1, 0)


def test_later_graphs_are_told_apart(clock, caplog):
    start = Startup("M")
    for seconds in (1, 2):
        with start.recording("trace"):
            clock.now += seconds
        start.log()
    assert caplog.messages == [
        "M: ready after 1.00 s (export 1.00 s)",
        "M: another graph was ready after 2.00 s (export 2.00 s)",
    ]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def _terminal(monkeypatch):
    # Not in a fixture: pytest sets sys.stderr again before the test itself.
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def _wait_for(condition):
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)


def test_a_long_phase_is_shown_on_a_terminal(monkeypatch):
    terminal = _terminal(monkeypatch)
    pytest.importorskip("rich", reason="the line is rich's")
    with Startup("Model").recording("trace"):
        _wait_for(lambda: "trace" in terminal.getvalue())
    assert "torch2ort: Model: trace (" in terminal.getvalue()
    assert "torch2ort-progress" not in [thread.name for thread in threading.enumerate()]


def test_an_export_of_more_than_two_seconds_is_shown_on_a_terminal(monkeypatch):
    pytest.importorskip("rich", reason="the line is rich's")
    assert progress.PATIENCE == 2.0
    terminal = _terminal(monkeypatch)

    class Slow(torch.nn.Module):
        def forward(self, x):
            _wait_for(lambda: "trace" in terminal.getvalue())
            return x + 1

    torch2ort.export(Slow(), torch.randn(3))
    assert "torch2ort: Slow: trace (" in terminal.getvalue()


def test_nothing_is_shown_without_a_terminal(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    with Startup("Model").recording("trace"):
        assert threading.active_count() == len([t for t in threading.enumerate() if "progress" not in t.name])
    assert stream.getvalue() == ""


def test_without_rich_a_phase_gets_one_line_that_stays(monkeypatch):
    terminal = _terminal(monkeypatch)
    monkeypatch.setattr(progress, "_has_rich", lambda: False)
    with Startup("Model").recording("trace"):
        _wait_for(terminal.getvalue)
        time.sleep(0.2)
    assert terminal.getvalue() == "torch2ort: Model: trace (0 s)\n"


def test_a_debuggers_prompt_is_left_alone(monkeypatch):
    terminal = _terminal(monkeypatch)
    pytest.importorskip("rich", reason="the line is rich's")
    pause = {"__name__": "pdb", "time": time}
    exec("def prompt():\n    time.sleep(0.5)", pause)
    with Startup("Model").recording("trace"):
        pause["prompt"]()
        said = terminal.getvalue()
    assert said == ""
