"""torch2ort.compile_report(): the graphs, the reasons of graph breaks, and where operators run."""

from __future__ import annotations

import time

import pytest
import torch

import torch2ort
from tests.support.functions import Square
from torch2ort.support.startup_timing import PHASES


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "torch2ort"]


def test_it_says_what_starts_took_by_phase(caplog: pytest.LogCaptureFixture) -> None:
    torch.compiler.reset()
    assert torch2ort.compile_report().startup == {}
    function = torch.compile(lambda x: (x @ x).tanh(), backend="torch2ort")
    x = torch.randn(3, 3, requires_grad=True)
    begin = time.perf_counter()
    function(x).sum().backward()
    waited = time.perf_counter() - begin
    report = torch2ort.compile_report()
    seconds = report.startup
    assert list(seconds) == list(PHASES)
    assert all(seconds[phase] > 0 for phase in PHASES if phase not in ("cache look-up", "imports", "shapes"))
    assert 0.5 * waited < sum(seconds.values()) <= waited
    assert report.graphs[0].startup == seconds
    export = sum(seconds[phase] for phase in ("cache look-up", "imports", "trace", "translate", "shapes"))
    total = sum(seconds.values())
    assert told(caplog) == [f"graph 1 of torch.compile: ready after {total:.2f} s (export {export:.2f} s)"]
    assert f"  start: trace {seconds['trace']:.2f} s, translate {seconds['translate']:.2f} s" in str(report)


def test_later_calls_add_nothing(caplog: pytest.LogCaptureFixture) -> None:
    torch.compiler.reset()
    function = torch.compile(lambda x: x.sin(), backend="torch2ort")
    x = torch.ones(2, requires_grad=True)
    function(x).sum().backward()
    seconds = torch2ort.compile_report().startup
    function(x).sum().backward()
    assert torch2ort.compile_report().startup == seconds
    assert len(told(caplog)) == 1


def test_a_forward_without_a_backward_is_told_with_the_next_call(caplog: pytest.LogCaptureFixture) -> None:
    torch.compiler.reset()
    function = torch.compile(lambda x: x.cos(), backend="torch2ort")
    x = torch.ones(2, requires_grad=True)
    count = []
    for _ in range(3):
        function(x)
        count.append(len(told(caplog)))
    assert count == [0, 1, 1]


def test_it_lists_graphs_and_breaks_and_what_runs_where() -> None:
    torch.compiler.reset()
    options = {"keep_functions": True}

    @torch.compile(backend="torch2ort", options=options)
    def function(x):
        x = Square.apply(x @ x)
        torch._dynamo.graph_break(msg="of the test")
        return x.erfinv()

    function(torch.full((2, 2), 0.3, requires_grad=True))
    report = torch2ort.compile_report()
    assert len(report.graphs) == 2
    ((place, reason),) = report.breaks
    assert __file__ in place
    assert "graph_break" in reason
    forward, backward = report.graphs[0].halves
    assert (forward.kind, backward.kind) == ("forward", "backward")
    assert forward.operators["MatMul"] == 1
    assert forward.functions == backward.functions == {"tests.support.functions.Square": 1}
    assert report.graphs[1].halves[0].kernels == {"aten::erfinv": 1}
    assert str(report).startswith("2 graphs, 1 broken\ngraph to ")
    torch.compiler.reset()
    assert torch2ort.compile_report().graphs == ()
