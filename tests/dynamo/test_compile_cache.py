"""options={"cache_dir": ...}: a graph that another process compiled is not translated again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torch2ort
from tests.support.comparison import assert_same


def step(function, folder: Path, *sizes: int, dynamic: bool = False, **options):
    """Output and gradient of a newly compiled graph, and whether its halves came from the cache."""
    torch.compiler.reset()
    options = {"cache_dir": folder, **options}
    faster = torch.compile(function, backend="torch2ort", dynamic=dynamic, options=options)
    torch.manual_seed(5)
    x = torch.randn(sizes, requires_grad=True)
    output = faster(x)
    output.square().sum().backward()
    return (output.detach(), x.grad), [half.cached for half in halves()]


def halves():
    return [half for graph in torch2ort.compile_report().graphs for half in graph.halves]


def layer(factor):
    return lambda x: F.dropout(F.gelu(x.cumsum(0)), 0.3) * factor * x.shape[0] + torch.tensor([1.0, factor])


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_second_time_nothing_is_translated(tmp_path: Path, dynamic: bool) -> None:
    first, translated = step(layer(2.0), tmp_path, 3, 2, dynamic=dynamic)
    second, again = step(layer(2.0), tmp_path, 3, 2, dynamic=dynamic)
    assert (translated, again) == ([False, False], [True, True])
    assert_same(second, first, "output and gradient")


def test_another_number_size_or_setting_is_another_graph(tmp_path: Path) -> None:
    step(layer(2.0), tmp_path, 3, 2)
    assert step(layer(4.0), tmp_path, 3, 2)[1] == [False, False]
    assert step(layer(2.0), tmp_path, 4, 2)[1] == [False, False]


def test_calls_of_what_stays_whole_are_kept(tmp_path: Path) -> None:
    def function(x):
        return x.prod().expand(2)

    first, translated = step(function, tmp_path, 3)
    second, again = step(function, tmp_path, 3)
    assert (translated, again) == ([False, False], [True, True])
    assert_same(second, first, "output and gradient")


class Unread(torch.autograd.Function):
    """Calls a random operator and one that may raise, whose results are unused."""

    @staticmethod
    def forward(ctx, x):
        torch.rand(2)
        torch.linalg.inv(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


def test_what_nobody_reads_is_kept(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        cached = step(Unread.apply, tmp_path, 3, 3)[1]
        found.append((cached, torch.rand(1)))
    assert [cached for cached, _ in found] == [[False, False], [True, True]]
    assert_same(found[1][1], found[0][1], "the next random number")
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        torch.compile(Unread.apply, backend="torch2ort", options={"cache_dir": tmp_path})(torch.zeros(3, 3))


def scaled(factor: float, slope: float):
    """A Function whose code reads two numbers of a closure, and whose backward is not the derivative."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return torch.from_numpy(x.numpy() * factor)

        @staticmethod
        def backward(ctx, grad):
            return grad * slope * ctx.saved_tensors[0]

    return lambda x: Scaled.apply(x * 2).tanh()


def test_kept_functions_are_called_out_of_the_cache(tmp_path: Path) -> None:
    first, translated = step(scaled(2.0, 3.0), tmp_path, 3, keep_functions=True)
    second, again = step(scaled(2.0, 3.0), tmp_path, 3, keep_functions=True)
    assert (translated, again) == ([False, False], [True, True])
    assert_same(second, first, "output and gradient")


@pytest.mark.parametrize("changed", [(4.0, 3.0), (2.0, 5.0)], ids=["forward", "backward"])
def test_other_code_of_a_function_is_another_graph(tmp_path: Path, changed: tuple[float, float]) -> None:
    step(scaled(2.0, 3.0), tmp_path, 3, keep_functions=True)
    found, cached = step(scaled(*changed), tmp_path, 3, keep_functions=True)
    assert cached == [False, False]
    assert_same(found, step(scaled(*changed), tmp_path / "empty", 3, keep_functions=True)[0], "results")


class Clock(torch.autograd.Function):
    """Its code reads a value that differs between processes."""

    @staticmethod
    def forward(ctx, x):
        return x * 2 if time.time() else x

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_the_report_says_why_a_graph_is_not_kept(tmp_path: Path) -> None:
    for _ in range(2):
        assert step(Clock.apply, tmp_path, 3, keep_functions=True)[1] == [False, False]
    place = "code tests.dynamo.test_compile_cache.Clock.forward"
    reason = f"{place}: time.time may give another result in each process"
    assert [half.bypass_reason for half in halves()] == [reason, reason]
    assert f"(not cached: {reason})" in str(torch2ort.compile_report())


def in_a_process(folder: Path, **environment: str) -> dict[str, Any]:
    """Return the report of a process that trains with the cache; see ``compile_cache_process.py``."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.dynamo.compile_cache_process", str(folder)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        text=True,
        timeout=110,
        check=True,
    )
    return json.loads(found.stdout.splitlines()[-1])


def test_another_process_translates_nothing(tmp_path: Path) -> None:
    first = in_a_process(tmp_path, PYTHONHASHSEED="1")
    second = in_a_process(tmp_path, PYTHONHASHSEED="2", NO_TRANSLATION="1")
    assert (first["cached"], second["cached"]) == ([False, False], [True, True])
    assert first["functions"] == second["functions"] == {"tests.support.functions.Numpy": 1}
    assert second["results"] == first["results"] == pytest.approx(first["eager"], rel=1e-5)


def sines(scale: float):
    """A translation that reads a number of its closure."""
    return lambda g, x: g.op("Mul", g.op("Sin", x), scale)


def test_registered_translations_are_kept_by_their_code(tmp_path: Path) -> None:
    found = []
    for scale in (1.0, 2.0, 2.0, 1.0):
        torch2ort.register_symbolic("aten::sin", sines(scale), override=True)
        with torch.no_grad():
            torch.compiler.reset()
            faster = torch.compile(torch.sin, backend="torch2ort", options={"cache_dir": tmp_path})
            output = faster(torch.ones(2))
        torch2ort.unregister("aten::sin")
        assert_same(output, scale * torch.ones(2).sin(), "output")
        found += [half.cached for half in halves()]
    assert found == [False, False, True, True]
