"""Statistics of activations and gradients are the same files for eager PyTorch and ONNX Runtime."""

from __future__ import annotations

import copy
import json

import pytest
import torch

import torch2ort
from tests.support.functions import Square
from torch2ort.hooks import StatisticsSubscriber, subscribe
from torch2ort.hooks import statistics as statistics_module
from torch2ort.hooks import subscription as subscription_module
from torch2ort.hooks.statistics_records import read, statistics, steps


class Model(torch.nn.Module):
    """A module that runs twice, one that writes in place, one that returns several tensors."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(4, 6), torch.nn.ReLU(inplace=True), torch.nn.Linear(6, 4)
        )
        self.many = Many()

    def forward(self, x):
        x = self.first(Square.apply(self.first(x)))
        found = self.many(self.body(x), scale=x)
        return found["y"] * found["z"][0]


class Many(torch.nn.Module):
    def forward(self, x, scale):
        return {"y": x * scale, "z": (x.exp(), 3)}


def _run(model, folder, inputs, **settings):
    with subscribe(model, [StatisticsSubscriber(folder, **settings)]):
        for x in inputs:
            model(x).sum().backward()
    return {step: list(read(path)) for step, path in steps(folder).items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    torch.manual_seed(1)
    model, inputs = Model(), [torch.randn(3, 4) for _ in range(3)]
    folder = tmp_path_factory.mktemp("statistics")
    ort = torch2ort.ORTModule(copy.deepcopy(model))
    return _run(copy.deepcopy(model), folder / "eager", inputs), _run(ort, folder / "ort", inputs), folder


def test_there_is_a_file_a_step(runs):
    names = [f"step_00000{i}.jsonl" for i in range(3)]
    assert [sorted(p.name for p in (runs[2] / way).iterdir()) for way in ("eager", "ort")] == [names, names]


def test_eager_and_onnxruntime_see_the_same_tensors(runs):
    places = [{step: sorted(r.place for r in records) for step, records in way.items()} for way in runs[:2]]
    assert places[0] == places[1]


def test_their_numbers_are_the_same(runs):
    for step, records in runs[0].items():
        others = {record.place: record for record in runs[1][step]}
        for record in records:
            other = others[record.place]
            assert (record.shape, record.dtype, record.kind) == (other.shape, other.dtype, other.kind)
            for name in ("min", "max", "mean", "std", "zeros", "nan", "inf"):
                expected = pytest.approx(getattr(other, name), rel=1e-4, abs=1e-5)
                assert getattr(record, name) == expected, (record.place, name)


def test_each_module_and_the_model_are_there_forward_and_backward(runs):
    found = {(r.direction, r.module, r.call, r.output) for r in runs[1][1]}
    modules = [
        ("", 0, 0),
        ("first", 0, 0),
        ("first", 1, 0),
        ("body", 0, 0),
        ("body.0", 0, 0),
        ("body.2", 0, 0),
    ]
    modules += [("many", 0, 0), ("many", 0, 1)]
    expected = {(direction, *module) for direction in ("forward", "backward") for module in modules}
    # A module that writes in place returns its argument, whose gradient is that of the module before it.
    assert found == expected | {("forward", "body.1", 0, 0)}


def test_forward_is_in_the_order_of_the_calls(runs):
    forward = [r.module for r in runs[0][0] if r.direction == "forward"]
    assert forward == ["first", "first", "body.0", "body.1", "body.2", "body", "many", "many", ""]


def test_a_line_is_json_with_these_fields(runs):
    line = json.loads((runs[2] / "ort" / "step_000000.jsonl").read_text().splitlines()[0])
    assert list(line) == [
        "module", "kind", "direction", "output", "call", "shape", "dtype",
        "min", "max", "mean", "std", "zeros", "nan", "inf",
    ]  # fmt: skip


def test_steps_and_depth_are_those_that_were_asked_for(tmp_path):
    inputs = [torch.randn(2, 4) for _ in range(4)]
    found = _run(Model(), tmp_path, inputs, start_step=1, end_step=3, depth=1)
    assert list(found) == [1, 2]
    assert {r.module for r in found[1]} == {"", "first", "body", "many"}


def test_results_and_gradients_are_those_of_the_model_alone(tmp_path):
    model, x = Model(), torch.randn(3, 4)
    plain, watched = copy.deepcopy(model), copy.deepcopy(model)
    expected = plain(x)
    expected.sum().backward()
    with subscribe(watched, [StatisticsSubscriber(tmp_path)]):
        actual = watched(x)
        actual.sum().backward()
    assert torch.equal(actual, expected)
    for a, b in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_numbers_that_are_none_are_counted_and_left_out():
    found = statistics(torch.tensor([0.0, 1.0, 3.0, torch.nan, torch.inf, -torch.inf]))
    assert found == {
        "shape": (6,), "dtype": "float32", "min": 0.0, "max": 3.0, "mean": pytest.approx(4 / 3),
        "std": pytest.approx(1.2472191), "zeros": 1, "nan": 1, "inf": 2,
    }  # fmt: skip


@pytest.mark.parametrize("tensor", [torch.zeros(0, 3), torch.full((2,), torch.nan)])
def test_where_nothing_is_finite_there_is_no_number(tensor):
    found = statistics(tensor)
    assert [found[name] for name in ("min", "max", "mean", "std")] == [None] * 4


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex64])
def test_every_dtype_has_statistics(dtype):
    assert statistics(torch.ones(2, dtype=dtype))["mean"] == 1.0


def test_a_folder_of_another_run_is_refused(runs, tmp_path):
    folder = runs[2] / "eager"
    message = (
        f"^StatisticsSubscriber: the folder {folder} holds statistics of another run; name another one, "
        f"or pass overwrite=True.$"
    )
    with pytest.raises(torch2ort.OptionError, match=message):
        StatisticsSubscriber(folder)


def test_overwrite_replaces_it(tmp_path):
    _run(Model(), tmp_path, [torch.randn(2, 4)] * 2)
    assert list(_run(Model(), tmp_path, [torch.randn(2, 4)], overwrite=True)) == [0]


def test_one_subscriber_takes_one_model(tmp_path):
    subscriber = StatisticsSubscriber(tmp_path)
    message = "^StatisticsSubscriber: it is already subscribed to a model; make another one for this model.$"
    with (
        subscribe(Model(), [subscriber]),
        pytest.raises(torch2ort.OptionError, match=message),
    ):
        subscribe(Model(), [subscriber])


def test_a_backward_after_the_end_writes_nothing(tmp_path):
    model = Model()
    with subscribe(model, [StatisticsSubscriber(tmp_path)]):
        loss = model(torch.randn(2, 4)).sum()
    loss.backward()
    assert {r.direction for r in read(steps(tmp_path)[0])} == {"forward"}


def test_a_start_out_of_the_cache_writes_as_well(tmp_path, monkeypatch):
    model, options = Model(), torch2ort.Options(cache_dir=tmp_path / "cache")
    for folder in ("first", "second"):
        for numbered in (statistics_module, subscription_module):
            monkeypatch.setattr(numbered, "_numbers", iter([7]))  # as in two processes
        ort = torch2ort.ORTModule(copy.deepcopy(model), options=options)
        found = _run(ort, tmp_path / folder, [torch.randn(2, 4)])
    assert ort.exported.cache.hit, ort.exported.cache
    assert {r.direction for r in found[0]} == {"forward", "backward"}
