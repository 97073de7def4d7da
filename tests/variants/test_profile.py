"""``ORTModule.profile`` reports the time of steps by operator, Function and line of the model's source."""

from __future__ import annotations

import inspect
import json
import re
import tempfile

import pytest
import torch

import torch2ort
from tests.support.functions import Square


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)

    def forward(self, x):
        x = self.layer(x)
        x = Square.apply(x)
        return x.exp().sum()


def _line(text):
    lines, first = inspect.getsourcelines(Model)
    return f"{__file__}:{first + next(i for i, line in enumerate(lines) if text in line)}"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The folder of unnamed files while this module's tests run."""
    folder = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        yield folder


@pytest.fixture(scope="module")
def profiled(files):
    """A module, and the profile of two of its steps, which came after one and before another."""
    torch.manual_seed(0)
    module = torch2ort.ORTModule(Model())
    x = torch.randn(5, 6)
    module(x).backward()
    expected = module.layer.weight.grad.clone()
    module.layer.weight.grad = None
    profile = module.profile(2)
    for step in range(3):
        module(x).backward()
        torch.testing.assert_close(module.layer.weight.grad, (step + 1) * expected)
    return module, profile


def test_it_watches_as_many_steps_as_it_was_told(profiled):
    assert profiled[1].seen == 2


def test_operators_have_calls_time_and_memory(profiled):
    rows = {row.name: row for row in profiled[1].operators}
    assert rows["Exp"].calls == 2
    assert rows["Exp"].seconds > 0
    # The node's output is allocated while it runs.
    assert rows["Exp"].peak_bytes >= 4 * 5 * 6
    assert sum(row.share for row in rows.values()) == pytest.approx(1)


def test_functions_are_named_forward_and_backward(profiled):
    rows = {row.name: row for row in profiled[1].functions}
    name = f"{Square.__module__}.{Square.__qualname__}"
    assert rows[name].calls == 4
    assert all(name.startswith("torch.ops.aten.") for name in rows if name != f"{Square.__module__}.Square")


def test_lines_are_those_of_the_model(profiled):
    rows = {row.name: row for row in profiled[1].lines}
    for text in ("self.layer(x)", "Square.apply(x)", "x.exp()"):
        assert rows[_line(text)].seconds > 0
    # The layer's gradients, too.
    assert rows[_line("self.layer(x)")].calls >= 4


def test_derivatives_are_of_the_module_that_they_are_derivatives_of(profiled):
    layer = [event for event in profiled[1].events if event.origin.line == _line("self.layer(x)")]
    assert {event.origin.module for event in layer} == {"layer"}


def test_the_table_has_the_three(profiled):
    text = profiled[1].table(rows=1)
    heads = [line.split()[0] for line in text.splitlines() if line.endswith("peak")]
    assert heads == ["operator", "Function", "line"]
    assert text.startswith("2 steps, ")
    assert str(profiled[1]) == profiled[1].table()


def test_json_has_the_same_rows(profiled):
    found = json.loads(profiled[1].to_json())
    assert found["steps"] == 2
    assert [row["name"] for row in found["operators"]] == [row.name for row in profiled[1].operators]
    assert set(found["lines"][0]) == {"name", "calls", "seconds", "share", "peak_bytes"}


def test_the_chrome_trace_has_an_event_a_run_of_a_node(profiled, tmp_path):
    profiled[1].chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    runs = [event for event in events if event["ph"] == "X"]
    assert len(runs) == len(profiled[1].events)
    square = next(event for event in runs if event["name"] == "Square")
    assert square["args"]["line"] == _line("Square.apply(x)")
    assert [event["ts"] for event in runs] == sorted(event["ts"] for event in runs)


def test_no_file_is_left(profiled, files):
    assert profiled[1].events
    assert [path for path in files.rglob("*") if path.is_file()] == []


def test_inference_is_profiled_in_a_block(profiled):
    module, _ = profiled
    with torch.no_grad(), module.profile(1) as profile:
        module(torch.randn(2, 6))
    assert {row.name for row in profile.operators} >= {"Exp", "PythonOp"}
    assert profile.seen == 1


def test_a_profile_of_no_step_is_an_error(profiled):
    message = (
        "^profile: the module was not called since; call profile\\(steps\\), then run the steps, then ask$"
    )
    profile = profiled[0].profile(1)
    with pytest.raises(torch2ort.EngineError, match=message):
        profile.table()


@pytest.mark.parametrize("steps", [0, -1, True, 1.5, "3"])
def test_steps_are_counted(profiled, steps):
    message = re.escape(f"profile: steps is {steps!r}; allowed is an integer of at least 1.")
    with pytest.raises(torch2ort.OptionError, match=f"^{message}$"):
        profiled[0].profile(steps)
