"""A graph is not used after a change of its dependencies: the next call gives eager PyTorch's result.

Each change of a model is tested on the guards alone, which takes milliseconds, and through ORTModule: a part
of them here, all of them with the long tests.
"""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import optree
import pytest
import torch

import torch2ort
from tests.conftest import LONG
from tests.support.comparison import assert_same
from tests.variants.model_changes import IRRELEVANT, WAYS, Reads, Way, times
from torch2ort import io_schema
from torch2ort.cache.key.key import Dependencies, dependencies

nn = torch.nn


def found(model: nn.Module) -> Dependencies:
    """The dependencies of a graph of ``model``."""
    tensors, schema = io_schema.flatten({"x": torch.randn(3, 4)})
    return dependencies(model, tensors, schema, with_hooks=False)


@pytest.fixture
def changed(request: pytest.FixtureRequest) -> Any:
    """Return a function that changes a model; the change is undone after the test."""

    def change(way: Way, model: nn.Module) -> None:
        request.addfinalizer(way.restore)
        way.change(model)

    return change


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_guard_tells_of_a_change(way: Way, changed: Any):
    model = way.make()
    before = found(model)
    guards = before.arm_guards()
    assert guards.first_change() is None
    changed(way, model)
    assert guards.first_change() is not None
    assert found(model).changes(before) != []


@pytest.mark.parametrize("way", IRRELEVANT, ids=str)
def test_what_nobody_reads_is_no_change(way: Way, changed: Any):
    model = way.make()
    before = found(model)
    guards = before.arm_guards()
    changed(way, model)
    assert guards.first_change() is None or found(model).changes(before) == []


def gradients(
    call: Any, x: torch.Tensor, model: nn.Module | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """Return the result of a call, and the gradients of the parameters of ``model``, by default ``call``."""
    model = call if model is None else model
    model.zero_grad()
    result = call(x)
    if result.requires_grad:
        result.square().sum().backward()
    return result.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("way", WAYS if LONG else WAYS[::8], ids=str)
def test_the_call_after_a_change_is_eagers(way: Way, changed: Any):
    model = way.make()
    wrapped = torch2ort.ORTModule(model)
    x = torch.randn(3, 4)
    wrapped(x).sum().backward()
    first = wrapped.exported
    changed(way, model)
    expected, expected_gradients = gradients(model, x)
    actual, actual_gradients = gradients(wrapped, x)
    assert wrapped.exported is not first
    assert_same(actual, expected, "result")
    for name, gradient in expected_gradients.items():
        assert_same(actual_gradients[name], gradient, name)


@pytest.mark.parametrize("way", IRRELEVANT if LONG else IRRELEVANT[::4], ids=str)
def test_a_change_that_does_not_matter_does_not_export(way: Way, changed: Any):
    model = way.make()
    wrapped = torch2ort.ORTModule(model)
    x = torch.randn(3, 4)
    wrapped(x)
    first = wrapped.exported
    changed(way, model)
    assert_same(wrapped(x), model(x), "result")
    assert wrapped.exported is first


def test_a_state_that_comes_back_finds_its_graph():
    model = Reads(times, scale=2.0)
    wrapped = torch2ort.ORTModule(model)
    x = torch.randn(3, 4)
    graphs = []
    for scale in (2.0, 3.0, 2.0, 3.0):
        model.scale = scale
        assert_same(wrapped(x), model(x), f"result for {scale}")
        graphs.append(wrapped.exported)
    assert graphs[0] is graphs[2]
    assert graphs[1] is graphs[3]
    assert graphs[0] is not graphs[1]


def test_a_state_that_is_made_anew_for_each_call_finds_its_graph():
    model = Reads(lambda m, h: h * m.scales[0], scales=[2.0])
    wrapped = torch2ort.ORTModule(model)
    x = torch.randn(3, 4)
    wrapped(x)
    first = wrapped.exported
    for _ in range(3):
        model.scales = [2.0]
        wrapped(x)
        assert wrapped.exported is first


def test_a_tensor_attribute_that_is_replaced_by_one_of_its_form_is_fed():
    model = Reads(lambda m, h: h + m.offset, offset=torch.ones(4))
    wrapped = torch2ort.ORTModule(model)
    x = torch.randn(3, 4)
    wrapped(x)
    first = wrapped.exported
    model.offset = torch.full((4,), 3.0)
    assert_same(wrapped(x), model(x), "result after it was replaced")
    model.offset.add_(1.0)
    assert_same(wrapped(x), model(x), "result after it was written to")
    assert wrapped.exported is first


def test_parameters_that_are_replaced_in_every_call_export_once():
    model = Reads(times, scale=2.0)
    wrapped = torch2ort.ORTModule(copy.deepcopy(model))
    x = torch.randn(3, 4)
    graphs = set()
    for _ in range(3):
        weights = {name: torch.randn_like(p) for name, p in model.named_parameters()}
        actual = torch.func.functional_call(wrapped, weights, (x,))
        assert_same(actual, torch.func.functional_call(model, weights, (x,)), "result")
        graphs.add(id(wrapped.exported))
    assert len(graphs) == 1


def test_two_models_of_one_class_have_guards_of_their_own():
    first, second = (torch2ort.ORTModule(Reads(times, scale=s)) for s in (2.0, 3.0))
    x = torch.randn(3, 4)
    assert_same(first(x), first.module(x), "first")
    assert_same(second(x), second.module(x), "second")
    graph = first.exported
    second.scale = 4.0
    second(x)
    first(x)
    assert first.exported is graph


TOTAL = 0


class Counting(torch.autograd.Function):
    """Records its own calls, in all possible places."""

    calls = 0
    seen: ClassVar[list[torch.Size]] = []
    tables: ClassVar[dict[torch.Size, torch.Tensor]] = {}

    @staticmethod
    def forward(ctx, x):
        global TOTAL
        if type(x) is torch.Tensor:  # and not a tensor without memory, in an export
            TOTAL += 1
            Counting.calls += 1
            Counting.seen.append(x.shape)
            Counting.tables.setdefault(x.shape, torch.full(x.shape, 2.0))
        return x * Counting.tables.get(x.shape, 2.0)

    @staticmethod
    def backward(ctx, grad):
        Counting.calls += 1
        return grad * 2


@pytest.fixture
def no_calls(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Counting, "calls", 0)
    monkeypatch.setattr(Counting, "seen", [])
    monkeypatch.setattr(Counting, "tables", {})


@pytest.mark.usefixtures("no_calls")
@pytest.mark.filterwarnings("error::torch2ort.Torch2OrtWarning")
def test_what_a_function_writes_for_itself_exports_nothing():
    model = Reads(lambda m, h: Counting.apply(h))
    first, second = torch2ort.ORTModule(model), torch2ort.ORTModule(copy.deepcopy(model))
    x = torch.randn(3, 4)
    graphs = set()
    for _ in range(6):
        expected, _ = gradients(model, x)
        for module in (first, second):
            actual, _ = gradients(module, x)
            assert_same(actual, expected, "result")
            graphs.add(id(module.exported))
    assert Counting.calls == 6 * 3 * 2
    assert len(graphs) == 2


class Calls:
    """A container with an attribute of the same name as a Function's."""

    calls = ()


@pytest.mark.usefixtures("no_calls")
def test_how_a_container_is_taken_apart_reads_nothing_of_a_function(request: pytest.FixtureRequest):
    request.addfinalizer(lambda: optree.unregister_pytree_node(Calls, namespace="torch2ort"))
    optree.register_pytree_node(
        Calls, lambda box: (box.calls, None), lambda _, items: Calls(), namespace="torch2ort"
    )
    wrapped = torch2ort.ORTModule(Reads(lambda m, h: Counting.apply(h)))
    graphs = set()
    for _ in range(3):
        wrapped(torch.randn(3, 4))
        graphs.add(id(wrapped.exported))
    assert len(graphs) == 1


class Noting(torch.autograd.Function):
    """Records its input under a name that code of torch reads of dictionaries."""

    values: ClassVar[list[torch.Size]] = []

    @staticmethod
    def forward(ctx, x):
        Noting.values.append(x.shape)
        return x * 2.0

    @staticmethod
    def backward(ctx, grad):
        return grad * 2.0


def test_what_torch_reads_by_a_name_is_nothing_of_a_function(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Noting, "values", [])
    wrapped = torch2ort.ORTModule(Reads(lambda m, h: Noting.apply(h) if m.register_parameter else h))
    graphs = set()
    for _ in range(3):
        wrapped(torch.randn(3, 4))
        graphs.add(id(wrapped.exported))
    assert len(graphs) == 1


@pytest.mark.usefixtures("no_calls")
def test_what_a_function_writes_and_the_model_reads_counts():
    model = Reads(lambda m, h: Counting.apply(h * (1 + Counting.calls)))
    wrapped = torch2ort.ORTModule(model)
    x = torch.randn(3, 4)
    for calls in range(3):
        Counting.calls = calls
        expected = model(x)
        Counting.calls = calls
        assert_same(wrapped(x), expected, f"result after {calls} calls")
        assert Counting.calls == calls + 1


def evaluated(m, h):
    return h * eval("2.0")


UNSEEN = {
    "eval": (
        lambda: Reads(evaluated),
        f"code {__name__}.evaluated: it calls eval(), and what the text reads is not seen. Call a function "
        "instead",
    ),
    "an iterator": (
        lambda: Reads(lambda m, h: h * next(m.steps), steps=itertools.count(2)),
        "module (the model), attribute steps: a count advances without exposing its position. Keep the "
        "values in a list, or pass them as arguments",
    ),
    "a generator": (
        lambda: Reads(lambda m, h: h * next(m.steps), steps=(2.0 for _ in range(9))),
        "module (the model), attribute steps: a generator advances without exposing its position. Keep the "
        "values in a list, or pass them as arguments",
    ),
    "a large NumPy array": (
        lambda: Reads(lambda m, h: h * float(m.table[0]), table=np.full(1 << 18, 2.0)),
        "module (the model), attribute table: a NumPy array of 2097152 bytes would have to be compared "
        "before each call. Make it a buffer with torch.from_numpy(array), or set array.flags.writeable = "
        "False",
    ),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_no_guard_tells_of_is_refused_by_name(name: str):
    make, reason = UNSEEN[name]
    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.ORTModule(make())(torch.randn(3, 4))
    assert str(caught.value) == (
        f'Reads: {reason}. If it never changes, pass torch2ort.Options(guards="trust")'
    )


@pytest.mark.parametrize("name", UNSEEN)
def test_what_no_guard_tells_of_can_be_trusted(name: str):
    make, _ = UNSEEN[name]
    wrapped = torch2ort.ORTModule(make(), options=torch2ort.Options(guards="trust"))
    x = torch.randn(3, 4)
    assert_same(wrapped(x), 2 * wrapped.module.layer(x), "result")


def test_what_nobody_reads_may_be_anything():
    model = Reads(times, scale=2.0, steps=itertools.count())
    wrapped = torch2ort.ORTModule(model)
    x = torch.randn(3, 4)
    assert_same(wrapped(x), model(x), "result")


def test_a_module_that_forward_imports_is_guarded_once_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def compute(m, h):
        import imported_by_forward

        return h * imported_by_forward.SCALE

    (tmp_path / "imported_by_forward.py").write_text("SCALE = 2.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    model = Reads(compute)
    wrapped = torch2ort.ORTModule(model)
    x = torch.randn(3, 4)
    assert_same(wrapped(x), model(x), "result")
    first = wrapped.exported
    wrapped(x)
    assert wrapped.exported is first
    monkeypatch.setattr("imported_by_forward.SCALE", 3.0)
    assert_same(wrapped(x), model(x), "result after the change")


def test_an_object_that_cannot_be_looked_at_is_named():
    class Closed:
        def __getattribute__(self, name: str) -> Any:
            if name == "__dict__":
                raise ValueError("do not look")
            return object.__getattribute__(self, name)

    wrapped = torch2ort.ORTModule(Reads(lambda m, h: h * m.closed.scale, closed=Closed()))
    with pytest.raises(torch2ort.ExportError) as caught:
        wrapped(torch.randn(3, 4))
    assert str(caught.value) == (
        "Reads: the model's dependencies cannot be determined, as looking at the model raised ValueError: do "
        "not look. Keep such objects out of the state that forward reads"
    )
