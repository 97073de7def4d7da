"""The place of installation decides whether code is the user's, and not the names of folders and files."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import torch2ort
from tests.support.comparison import assert_same
from torch2ort.support.source_lines import is_users

X = torch.arange(12.0).reshape(3, 4) / 7
# A checkout of torch2ort, a model about torch, a file with a name of Python's own.
PLACES = ("torch2ort/model.py", "torch/net.py", "functools.py")

MODEL = """
import contextlib

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.calls = 0
        self.seen = []
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        return getattr(self, self.way)(self.layer(x).tanh())

    def branches(self, h):
        if h.sum() > 0:
            return h * 2
        return h

    def counts(self, h):
        self.calls += 1
        return h * self.calls

    def appends(self, h):
        self.seen.append(h.sum())
        return h * 2

    def packs(self, h):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
            return h.exp()

    def packs_in_a_stack(self, h):
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t))
            return h.exp()

    def assigns(self, h):
        self.mean = h.mean(0).detach()
        return h - self.mean

    def writes(self, h):
        self.mean.copy_(h.mean(0).detach())
        return h - self.mean
"""


@pytest.fixture(params=PLACES)
def models(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """A function from a way through the model's forward to a model, and the file that holds its class."""
    file = tmp_path / request.param
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(MODEL)
    module = imported("models_of_somebody", file)

    def made(way: str) -> torch.nn.Module:
        torch.manual_seed(0)
        model = module.Model()
        model.way = way
        return model

    yield made, file
    del sys.modules[module.__name__]


def imported(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def line(file: Path, text: str, function: str) -> str:
    """Return the name, in messages, of the line of ``file`` that begins with ``text``."""
    lines = file.read_text().splitlines()
    number = next(i for i, found in enumerate(lines, 1) if found.strip().startswith(text))
    return f"{file}:{number} in {function} ({lines[number - 1].strip()})"


def refusal(model: torch.nn.Module) -> str:
    with pytest.raises(torch2ort.ExportError) as refused:
        torch2ort.ORTModule(model)(X)
    return str(refused.value)


def test_a_branch_on_a_value_is_named_by_its_line(models: Any) -> None:
    made, file = models
    assert f"inside a tensor at {line(file, 'if h.sum() > 0:', 'branches')}, so" in refusal(made("branches"))


def test_what_changes_with_each_call_is_named_by_its_line(models: Any) -> None:
    made, file = models
    where = line(file, "self.calls += 1", "counts")
    assert refusal(made("counts")).startswith(f"Model: {where} changes Model.calls with each call")


@pytest.mark.parametrize("way", ["packs", "packs_in_a_stack"])
def test_hooks_on_what_autograd_saves_are_refused_by_their_line(models: Any, way: str) -> None:
    made, file = models
    text = "with torch.autograd.graph" if way == "packs" else "stack.enter_context"
    assert refusal(made(way)) == (
        f"Model: {line(file, text, way)} packs what autograd saves (saved_tensors_hooks), which a graph "
        f"cannot do. Use torch.utils.checkpoint, or have a torch.autograd.Function pack what it saves"
    )


@pytest.mark.parametrize("way", ["appends", "assigns", "writes"])
def test_what_forward_leaves_is_eagers(models: Any, way: str) -> None:
    made, _ = models
    eager, model = made(way), made(way)
    wrapped = torch2ort.ORTModule(model)
    for _ in range(2):
        expected, found = eager(X), wrapped(X)
        assert_same(found, expected, "output")
        assert_same((model.mean, model.seen), (eager.mean, eager.seen), "state")
        expected.square().sum().backward()
        found.square().sum().backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()], "gradients")


@pytest.mark.parametrize(
    "kind",
    [torch.nn.Linear, torch2ort.ORTModule, contextlib.ExitStack, functools.partialmethod, random.Random],
)
def test_libraries_are_known_by_their_files(kind: type) -> None:
    assert not is_users(sys.modules[kind.__module__].__file__)


def test_a_module_with_a_name_of_pythons_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    (tmp_path / "colorsys.py").write_text(MODEL)
    model = imported("colorsys", tmp_path / "colorsys.py").Model()
    model.way = "counts"
    where = line(tmp_path / "colorsys.py", "self.calls += 1", "counts")
    assert refusal(model).startswith(f"Model: {where} changes Model.calls with each call")
    monkeypatch.delitem(sys.modules, "colorsys")


@pytest.mark.parametrize("file", ["<eval_with_key>.3 from <eval_with_key>.1", "<frozen runpy>"])
def test_code_that_torch_and_python_make_is_not_the_users(file: str) -> None:
    assert not is_users(file)


@pytest.mark.parametrize("file", ["<stdin>", "<string>", "<ipython-input-3-5f6c>"])
def test_code_that_was_typed_is_the_users(file: str) -> None:
    assert is_users(file)


def test_a_typed_model_is_named_by_its_line() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(MODEL, "<stdin>", "exec"), names)
    model = names["Model"]()
    model.way = "branches"
    assert "inside a tensor at <stdin>:" in refusal(model)
