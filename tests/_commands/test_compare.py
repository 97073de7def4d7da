"""``python -m torch2ort compare`` names the first module where two runs part."""

from __future__ import annotations

import copy

import pytest
import torch

from torch2ort.__main__ import main
from torch2ort.hooks import StatisticsSubscriber, subscribe


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.second = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.second(self.first(x).tanh())


def _run(model, folder, depth=None, steps=2):
    with subscribe(model, [StatisticsSubscriber(folder, depth=depth)]):
        for step in range(steps):
            x = torch.randn(2, 3, generator=torch.Generator().manual_seed(step))
            model(x).sum().backward()
    return str(folder)


@pytest.fixture
def model():
    torch.manual_seed(2)
    return Model()


@pytest.fixture
def run(model, tmp_path):
    return _run(model, tmp_path / "a")


def test_equal_runs_are_the_same(run, model, tmp_path, capsys):
    other = _run(copy.deepcopy(model), tmp_path / "b")
    assert main(["compare", run, other]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 steps in common, 0 to 1, 12 tensors"
    assert lines[1].startswith(
        "the runs are the same: no difference above 0.0001; the largest, 0.0e+00, is at"
    )


def test_the_first_module_that_differs_is_named(run, model, tmp_path, capsys):
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.second.weight[0, 0] += 1
    assert main(["compare", run, _run(other, tmp_path / "b")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "the runs first differ in step 0 at second (Linear), forward, output 0"
    assert lines[2].startswith("  A: float32 [2, 3], min ")
    assert [line.split("  ")[-1] for line in lines if line.startswith(">")] == [
        "second (Linear), forward, output 0"
    ]


def test_a_difference_of_backward_alone_is_found(run, model, tmp_path, capsys):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.tanh()

        @staticmethod
        def backward(ctx, grad):
            return grad * 0.5

    class Other(Model):
        def forward(self, x):
            return self.second(Wrong.apply(self.first(x)))

    other = Other()
    other.load_state_dict(model.state_dict())
    assert main(["compare", run, _run(other, tmp_path / "b")]) == 1
    expected = "the runs first differ in step 0 at first (Linear), backward, output 0"
    assert capsys.readouterr().out.splitlines()[1] == expected


def test_a_nan_is_a_difference(run, model, tmp_path, capsys):
    with torch.no_grad():
        model.first.bias[0] = torch.nan
    main(["compare", run, _run(model, tmp_path / "b")])
    assert "at first (Linear), forward, output 0" in capsys.readouterr().out


def test_the_tolerance_is_the_users(run, model, tmp_path, capsys):
    with torch.no_grad():
        model.second.weight[0, 0] += 0.01
    other = _run(model, tmp_path / "b")
    assert main(["compare", run, other, "--tolerance", "0.5"]) == 0
    assert "the runs are the same: no difference above 0.5" in capsys.readouterr().out


def test_it_draws_a_picture(run, model, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the picture is matplotlib's")
    other, picture = _run(model, tmp_path / "b"), tmp_path / "parting.png"
    assert main(["compare", run, other, "-o", str(picture)]) == 0
    assert picture.read_bytes()[1:4] == b"PNG"
    assert capsys.readouterr().out.splitlines()[-1] == f"drawn in {picture}"


def test_models_that_are_not_alike_are_an_error(run, model, tmp_path, capsys):
    assert main(["compare", _run(model, tmp_path / "b", depth=0), run]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"step 0: {run} has statistics that {tmp_path / 'b'} lacks, of first (Linear)")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "{0}: no statistics; expected files step_000000.jsonl that a StatisticsSubscriber wrote\n"),
        ("{{}}", "{0}/step_000000.jsonl, line 1: not a record of a StatisticsSubscriber ('shape')\n"),
    ],
)
def test_a_folder_without_statistics_is_an_error(run, tmp_path, capsys, content, message):
    other = tmp_path / "b"
    other.mkdir()
    if content is not None:
        (other / "step_000000.jsonl").write_text("{}")
    assert main(["compare", run, str(other)]) == 1
    assert capsys.readouterr().err == message.format(other)


def test_runs_of_other_steps_are_an_error(run, tmp_path, capsys):
    other = tmp_path / "b"
    other.mkdir()
    (other / "step_000009.jsonl").write_text("")
    assert main(["compare", run, str(other)]) == 1
    expected = f"{run} and {other} have no step in common: steps 0 to 1, and steps 9 to 9\n"
    assert capsys.readouterr().err == expected
