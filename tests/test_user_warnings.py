"""A warning points to the line of the user's code that causes it."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch

import torch2ort
from tests.support.functions import Square


class Named(torch.nn.Module):
    def forward(self, x, name):
        return {name: x}


class Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Passed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(Passing.apply(self.layer(x)))


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(1))

    def forward(self, x):
        self.rows = x.detach()[:, 0]
        return Square.apply(x)


def changing_text(x):
    module = torch2ort.ORTModule(Named())
    for name in "abcde":
        module(x, name)  # points here


def backward(x):
    loss = torch2ort.ORTModule(Passed())(x).sum()
    loss.backward()  # points here


def assigned_buffer(x):
    torch2ort.export(Counting(), x)  # points here


def misspelt_name(x):
    torch2ort.register_exporter(f"{__name__}.Pasing", lambda g, x: x)
    try:
        torch2ort.export(Passed(), x)  # points here
    finally:
        torch2ort.unregister(f"{__name__}.Pasing")


def line_of(function) -> int:
    lines = Path(__file__).read_text().splitlines()
    first = function.__code__.co_firstlineno
    return next(n for n in range(first, len(lines) + 1) if lines[n - 1].endswith("# points here"))


@pytest.mark.parametrize("function", [changing_text, backward, assigned_buffer, misspelt_name])
def test_a_warning_points_to_the_users_line(function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(torch.randn(3, 4))
    ours = [w for w in caught if issubclass(w.category, torch2ort.Torch2OrtWarning)]
    assert ours
    assert {(w.filename, w.lineno) for w in ours} == {(__file__, line_of(function))}


def test_a_warning_out_of_another_thread_points_to_its_function():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread = threading.Thread(target=backward, args=(torch.randn(3, 4),))
        thread.start()
        thread.join()
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, line_of(backward))]


def test_a_warning_at_import_points_to_the_import(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "from importlib import metadata\n"
        "version = metadata.version\n"
        "metadata.version = lambda name: '99.0' if name == 'onnx-ir' else version(name)\n"
        "import torch2ort\n"
    )
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert f"{script}:4: Torch2OrtWarning: onnx-ir 99.0 is untested." in run.stderr
