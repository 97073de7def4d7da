"""Deterministic mode is set on sessions, and operators without a deterministic kernel are named once."""

from __future__ import annotations

import re
import warnings

import onnxruntime
import pytest
import torch

import torch2ort
from torch2ort.runtime import determinism


class Putting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x, index):
        return torch.put(x * self.weight, index, x[:2]).sum()


class Indexed(torch.nn.Module):
    def __init__(self, step):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.step = step

    def forward(self, x, index):
        return self.step(self.weight, x, index).sum()


@pytest.fixture(autouse=True)
def nothing_named(monkeypatch):
    monkeypatch.setattr(determinism, "_named", set())


@pytest.fixture
def told(monkeypatch):
    """The deterministic setting of each session, in the order of their creation."""
    found, make = [], onnxruntime.InferenceSession.__init__

    def note(self, model, settings=None, *args, **kwargs):
        found.append(settings.use_deterministic_compute)
        return make(self, model, settings, *args, **kwargs)

    monkeypatch.setattr(onnxruntime.InferenceSession, "__init__", note)
    return found


def _step(options=None, model=None):
    module = torch2ort.ORTModule(model or Putting(), options=options)
    for _ in range(2):
        module(torch.randn(4), torch.tensor([0, 2])).backward()


def _named_of(step, threads=2):
    """The operators that are named, each with its remedy."""
    options = torch2ort.Options(deterministic=True, intra_op_threads=threads)
    messages = _warned(lambda: _step(options, Indexed(step)))
    return [re.fullmatch(r".* asked for, and (\w\S*) .* run\. (.*)", m, re.DOTALL).groups() for m in messages]


def _put(weight, x, index):
    return weight.index_put((index,), x[:2], accumulate=True)


def _warned(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught if w.category is torch2ort.Torch2OrtWarning]


def test_the_option_reaches_every_session(told):
    _warned(lambda: _step(torch2ort.Options(deterministic=True)))
    assert set(told[-1:]) == {True}


def test_pytorchs_flag_reaches_every_session(told):
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        _warned(_step)
    finally:
        torch.use_deterministic_algorithms(False)
    assert set(told[-1:]) == {True}


def test_nobody_asked(told):
    assert _warned(_step) == []
    assert set(told) == {False}


def test_an_operator_without_a_deterministic_kernel_is_named_once():
    options = torch2ort.Options(deterministic=True)
    messages = _warned(lambda: (_step(options), _step(options)))
    expected = (
        "Deterministic results were asked for, and torch.ops.aten.put "
        rf"\({re.escape(__file__)}:\d+\) has no deterministic kernel: it may give another result in another "
        "run. Use another operator there"
    )
    (message,) = messages
    assert re.fullmatch(expected, message)


def test_a_kernel_that_pytorchs_flag_makes_deterministic_is_named_with_it():
    call = "Call torch.use_deterministic_algorithms(True), which gives it one"
    assert _named_of(_put) == [("torch.ops.aten.index_put", call)]


def test_with_pytorchs_flag_that_kernel_is_not_named():
    torch.use_deterministic_algorithms(True)
    try:
        assert _named_of(_put) == []
    finally:
        torch.use_deterministic_algorithms(False)


def test_indices_that_the_model_fixes_are_not_named():
    assert _named_of(lambda weight, x, index: weight[1] * x) == []
