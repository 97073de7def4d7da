"""torch2ort.compile_report(): which graphs there are, why they broke, and what runs where."""

from __future__ import annotations

import torch

import torch2ort
from tests.support.functions import Square


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
