"""Varying numbers among the arguments are inputs of one graph, if forward only computes with them."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest
import torch

import torch2ort
from tests.support.comparison import assert_same
from tests.support.sweeps import sample_cases
from tests.variants.model_changes import Powered
from tests.variants.test_guards import gradients

nn = torch.nn


class Takes(nn.Module):
    """A layer, and ``compute(h, number)`` of its result."""

    def __init__(self, compute: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.compute = compute

    def forward(self, x, number):
        return self.compute(self.layer(x), number)


def graphs_of(compute: Any, numbers: list[Any], x: torch.Tensor | None = None) -> int:
    """Compare calls with these numbers with eager PyTorch, and return the number of graphs that they need."""
    model = Takes(compute)
    wrapped = torch2ort.ORTModule(model)
    x = torch.randn(3, 4) if x is None else x
    graphs = set()
    for number in numbers:
        expected, expected_gradients = gradients(lambda x, n=number: model(x, n), x, model)
        actual, actual_gradients = gradients(lambda x, n=number: wrapped(x, n), x, model)
        assert_same(actual, expected, f"result for {number}")
        for name, gradient in expected_gradients.items():
            assert_same(actual_gradients[name], gradient, f"{name} for {number}")
        graphs.add(id(wrapped.exported))
    return len(graphs)


COMPUTED = {
    "product": lambda h, n: h * n,
    "product from the left": lambda h, n: n * h,
    "sum": lambda h, n: h + n,
    "sum from the left": lambda h, n: n + h,
    "difference": lambda h, n: h - n,
    "difference from the left": lambda h, n: n - h,
    "quotient": lambda h, n: h / n,
    "quotient from the left": lambda h, n: n / (h.abs() + 1),
    "torch.mul": lambda h, n: torch.mul(h, n),
    "torch.add": lambda h, n: torch.add(h, n),
    "method": lambda h, n: h.sub(n).div(n),
    "twice": lambda h, n: (h * n).softmax(-1) * n,
    "if it is a float": lambda h, n: h * n if isinstance(n, (int, float)) else h,
    "if it is given": lambda h, n: h if n is None else h * n,
    "with a number of no dimensions": lambda h, n: h.sum() * n,
}


@pytest.mark.filterwarnings("error::torch2ort.Torch2OrtWarning")
@pytest.mark.parametrize("name", sample_cases(COMPUTED, 2))
def test_a_number_that_forward_computes_with_exports_twice(name: str):
    assert graphs_of(COMPUTED[name], [0.5 + i for i in range(6)]) == 2


@pytest.mark.filterwarnings("error::torch2ort.Torch2OrtWarning")
def test_a_step_number_exports_twice():
    assert graphs_of(lambda h, n: h / n, [1, 2, 3, 100_000, 2**24 + 1, 7]) == 2


@pytest.mark.filterwarnings("error::torch2ort.Torch2OrtWarning")
def test_numbers_in_containers_and_several_of_them():
    numbers = [{"a": 1.0 + i, "b": (2, float(i), "text")} for i in range(6)]
    assert graphs_of(lambda h, n: h * n["a"] + h * n["b"][1] * n["b"][0], numbers) == 2


def test_numbers_without_end_and_zeros_with_a_sign():
    model = Takes(lambda h, n: n / h)
    wrapped = torch2ort.ORTModule(model)
    x = torch.randn(3, 4)
    with torch.no_grad():
        for number in (1.0, 2.0, math.inf, -math.inf, -0.0, 0.0, 1e300):
            actual, expected = wrapped(x, number), model(x, number)
            assert_same(actual, expected, f"result for {number}")
            assert torch.equal(actual.signbit(), expected.signbit())
        assert wrapped(x, math.nan).isnan().all()


READ = {
    "compared": lambda h, n: h if n > 1 else -h,
    "truth": lambda h, n: h if n else -h,
    "equality": lambda h, n: h if n == 2 else -h,
    "looked up": lambda h, n: h * {1: 2.0, 2: 5.0}.get(n, 1.0),
    "among others": lambda h, n: h if n in (1, 2) else -h,
    "rounded": lambda h, n: h * math.floor(n / 2),
    "minimum": lambda h, n: h * min(n, 2),
    "absolute": lambda h, n: h * abs(n),
    "negative": lambda h, n: h * -n,
    "power": lambda h, n: h * 2.0**n,
    "function of math": lambda h, n: h * math.exp(n),
    "written": lambda h, n: h * len(f"{n:03}"),
    "repr": lambda h, n: h if repr(n).startswith("1") else -h,
    "method": lambda h, n: h * float(n).hex().count("0"),
    "its own method": lambda h, n: h * (n.real + 1),
    "very type": lambda h, n: h if type(n) in (int, float) else -h,
    "caught": lambda h, n: _guarded(h, n),
    "new tensor": lambda h, n: h + torch.full((4,), float(n)),
    "torch.tensor": lambda h, n: h * torch.tensor(n),
    "exponent": lambda h, n: h.abs() ** n,
    "clamp": lambda h, n: h.clamp(max=n),
    "alpha": lambda h, n: torch.add(h, h, alpha=n),
    "in place": lambda h, n: h.clone().mul_(n),
    "tensor of integers": lambda h, n: h + (h > 0).long() * n,
    "argument of a Function": lambda h, n: Powered.apply(h, n),
}


def _guarded(h, n):
    try:
        return h if n > 1 else -h
    except Exception:
        return h * 7


@pytest.mark.parametrize(("name", "kind"), sample_cases(itertools.product(READ, (int, float)), 3))
def test_a_number_that_python_reads_has_a_graph_for_each_value(name: str, kind: type):
    assert graphs_of(READ[name], [kind(1), kind(2), kind(3)]) == 3


SIZES = {
    "slice": lambda h, n: h[:n],
    "shape": lambda h, n: h.reshape(n, -1),
    "dimension": lambda h, n: h.sum(n - 1),
    "repetition": lambda h, n: torch.cat([h] * n),
    "loop": lambda h, n: sum(h * i for i in range(n)),
    "index": lambda h, n: h[n],
}


@pytest.mark.parametrize("name", SIZES)
def test_a_number_that_is_a_size_has_a_graph_for_each_value(name: str):
    assert graphs_of(SIZES[name], [1, 2], torch.randn(4, 4)) == 2


@pytest.mark.parametrize(
    "numbers", [[True, False], [True, 1], [2, 2.0], [2**60, 2**60 + 1], ["a", "b"]], ids=str
)
def test_what_is_no_ordinary_number_has_a_graph_for_each_value(numbers: list[Any]):
    assert graphs_of(lambda h, n: h * n if not isinstance(n, str) else h * len(n), numbers) == 2


def test_numbers_in_half_precision_are_rounded_as_in_eager():
    model = Takes(lambda h, n: h.half() * n)
    wrapped = torch2ort.ORTModule(model)
    x = torch.randn(3, 4)
    with torch.no_grad():
        for number in (0.1, 0.7, 1.3):
            assert_same(wrapped(x, number), model(x, number), f"result for {number}", rtol=0, atol=1e-3)


def test_a_number_that_is_returned_is_the_calls():
    model = Takes(lambda h, n: (h * n, n))
    wrapped = torch2ort.ORTModule(model)
    x = torch.randn(3, 4)
    for number in (0.5, 1.5, 2.5):
        expected, actual = model(x, number), wrapped(x, number)
        assert_same(actual[0], expected[0], "tensor")
        assert actual[1] == number
        assert type(actual[1]) is float


def test_a_number_is_verified_as_a_number():
    model = Takes(lambda h, n: h * n)
    wrapped = torch2ort.ORTModule(model, options=torch2ort.Options(verify=True))
    x = torch.randn(3, 4)
    for number in (0.5, 1.5, 2.5):
        assert_same(wrapped(x, number), model(x, number), "result")


def test_a_number_that_python_reads_in_every_call_warns():
    model = Takes(lambda h, n: h * 2.0**n)
    wrapped = torch2ort.ORTModule(model)
    x = torch.randn(3, 4)

    def run() -> None:
        for number in range(7):
            wrapped(x, number)

    message = (
        "Takes: the argument inputs['number'] is no tensor and changes from call to call, and each of its "
        "values gets a graph of its own, 5 so far. Pass it as a tensor, as torch.tensor(value)"
    )
    with pytest.warns(torch2ort.Torch2OrtWarning, match=f"^{re.escape(message)}$"):
        run()


def test_the_numbers_of_a_cached_graph_are_inputs_in_the_next_process_too(tmp_path):
    x = torch.randn(3, 4)
    hits = []
    for _ in range(2):
        model = Takes(scaled)
        wrapped = torch2ort.ORTModule(model, options=torch2ort.Options(cache_dir=tmp_path))
        for number in (0.5, 1.5, 2.5):
            assert_same(wrapped(x, number), model(x, number), "result")
            hits.append(wrapped.exported.cache.hit)
    assert hits == [False] * 3 + [True] * 3


def scaled(h, n):
    return h * n


def test_a_tensor_in_a_numbers_place_is_a_tensor():
    model = Takes(lambda h, n: h * (2 if isinstance(n, torch.Tensor) else n))
    wrapped = torch2ort.ORTModule(model)
    x = torch.randn(3, 4)
    for number in (0.5, 1.5, torch.tensor(1.5, dtype=torch.float64), 2.5):
        assert_same(wrapped(x, number), model(x, number), f"result for {number}")
