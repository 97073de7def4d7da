"""Python objects that a Function writes to have the same state in a graph's calls as in eager PyTorch's."""

from __future__ import annotations

import copy
import csv
import functools
import io
import itertools
import random
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch.autograd import Function

import torch2ort
from tests.support.callable_module import CallableModule
from tests.support.comparison import assert_same, assert_trains_like_eager


class Counts(Function):
    """Writes to the dict that it gets."""

    @staticmethod
    def forward(ctx, x, record):
        record["n"] += 1
        ctx.factor = record["n"]
        return x * record["n"]

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class CountsWithSetup(Function):
    """Does the same with setup_context."""

    @staticmethod
    def forward(x, record):
        record["n"] += 1
        return x * record["n"]

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[1]["n"]

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class Appends(Function):
    @staticmethod
    def forward(ctx, x, record):
        record[0].append(x.shape[0])
        record[1]["inner"].add(len(record[0]))
        return x * len(record[0]) + len(record[1]["inner"])

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


class Range:
    """An observer: a smallest value, and how often it looked."""

    def __init__(self) -> None:
        self.low: torch.Tensor | None = None
        self.seen = 0


class Slotted:
    __slots__ = ("low", "seen")

    def __init__(self) -> None:
        self.low, self.seen = None, 0


class Observes(Function):
    @staticmethod
    def forward(ctx, x, observer):
        low = x.min()
        observer.low = low if observer.low is None else torch.minimum(observer.low, low)
        observer.seen += 1
        return x - observer.low * observer.seen

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


class ObservesBuffer(Function):
    @staticmethod
    def forward(ctx, x, module):
        module.low.copy_(torch.minimum(module.low, x.min()))
        return x - module.low

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


class WithBuffer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros(()))


def step_of(model: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Output and gradients of a step."""
    model.zero_grad()
    output = model(x)
    output.square().mean().backward()
    return output.detach(), *(p.grad.clone() for p in model.parameters())


def assert_steps_like_eager(model: torch.nn.Module, steps: int = 3) -> torch.nn.Module:
    wrapped = torch2ort.ORTModule(copy.deepcopy(model))
    for step in range(steps):
        x = torch.randn(3, 4)
        expected, actual = step_of(model, x), step_of(wrapped, x)
        for a, e in zip(actual, expected, strict=True):
            assert_same(a, e, f"step {step}")
    return wrapped


FRESH = {
    "dict": lambda model, h: Counts.apply(h, {"n": 1}),
    "dict, with setup": lambda model, h: CountsWithSetup.apply(h, {"n": 1}),
    "nested": lambda model, h: Appends.apply(h, ([], {"inner": {0}})),
    "two calls": lambda model, h: Counts.apply(Counts.apply(h, {"n": 1}), {"n": 1}),
    "object": lambda model, h: Observes.apply(h, Range()),
    "read and held": lambda model, h: Counts.apply(h, {"n": model.held["n"]}),
}


@pytest.mark.parametrize("call", FRESH.values(), ids=FRESH)
def test_what_the_model_makes_anew_is_new_in_each_call(call):
    assert_steps_like_eager(CallableModule(call, {"n": 1}))


@pytest.mark.parametrize("call", [FRESH["dict"], FRESH["nested"]])
def test_so_it_is_in_a_file(call, tmp_path):
    model, x = CallableModule(call).eval(), torch.randn(3, 4)
    exported = torch2ort.export(model, x)
    exported.save(tmp_path / "model.onnx")
    loaded = torch2ort.load(tmp_path / "model.onnx", functions=(Counts, Appends))
    for _ in range(3):
        assert_same(exported(x), model(x).detach(), "exported")
        assert_same(loaded(x), model(x).detach(), "loaded")


class Draws(Function):
    """Scales by the number that ``draw`` gets from an object."""

    @staticmethod
    def forward(ctx, x, source, draw):
        return x * float(draw(source))

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None, None


STEPPING = {
    "count": (lambda: itertools.count(1), next),
    "list_iterator": (lambda: iter([1, 2, 3, 4]), next),
    "StringIO": (lambda: io.StringIO("1\n2\n"), lambda source: float(source.readline())),
    "reader": (lambda: csv.reader(["1", "2"]), lambda source: float(next(source)[0])),
    "generator": (lambda: (n for n in (1, 2, 3, 4)), next),
    "Random": (lambda: random.Random(0), random.Random.random),
    "RandomState": (lambda: np.random.RandomState(0), lambda source: source.rand()),
    "Generator": (lambda: np.random.default_rng(0), lambda source: source.random()),
    "Generator, torch's": (torch.Generator, lambda source: torch.rand(1, generator=source)),
}


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("kind", STEPPING)
def test_what_steps_on_unseen_is_refused_where_the_model_makes_it_anew(kind, within):
    make, draw = STEPPING[kind]
    if within:
        model = CallableModule(
            lambda _, h: Draws.apply(h, {"from": [make()]}, lambda held: draw(held["from"][0]))
        )
    else:
        model = CallableModule(lambda _, h: Draws.apply(h, make(), draw))
    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.ORTModule(model)(torch.randn(3, 4))
    assert str(caught.value) == (
        f"{__name__}.Draws: argument 1 is or holds a {kind.partition(',')[0]} that the model creates in "
        f"each of its calls, and a graph has one for all calls, which advances. Create it in the Function's "
        f"forward, from arguments such as a list or a seed"
    )


HELD = {
    "dict": (lambda model, h: Counts.apply(h, model.held), lambda: {"n": 1}),
    "in a new tuple": (lambda model, h: Appends.apply(h, (model.held, {"inner": set()})), list),
    "object": (lambda model, h: Observes.apply(h, model.held), Range),
    "object with slots": (lambda model, h: Observes.apply(h, model.held), Slotted),
    "buffer of a module": (lambda model, h: ObservesBuffer.apply(h, model.held), WithBuffer),
}


@pytest.mark.parametrize(("call", "held"), HELD.values(), ids=HELD)
def test_what_the_model_holds_is_the_same_in_each_call(call, held):
    model = CallableModule(call, held())
    wrapped = torch2ort.ORTModule(copy.deepcopy(model))
    own = wrapped.held
    wrapped(torch.randn(3, 4))
    assert wrapped.held is own
    assert_steps_like_eager(model)


@pytest.mark.parametrize("name", ["object", "object with slots", "dict"])
def test_an_export_leaves_no_trace_in_what_the_model_holds(name):
    call, held = HELD[name]
    model = CallableModule(call, held())
    own = model.held
    torch2ort.export(model, torch.randn(3, 4))
    assert model.held is own
    if name == "dict":
        assert own == {"n": 1}
    else:
        assert (own.low, own.seen) == (None, 0)


def test_eager_is_as_before_after_an_export():
    model, x = CallableModule(HELD["object"][0], Range()), torch.randn(3, 4)
    expected = copy.deepcopy(model)(x)
    torch2ort.export(model, x)
    actual = model(x)
    assert type(actual) is torch.Tensor
    assert_same(actual, expected, "eager")


REMEMBERED: list[torch.Tensor] = []


@functools.lru_cache
def table(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32)


def closure():
    kept = {}

    class Kept(Function):
        """Caches in its class, a closure, a global and a memo."""

        tables: ClassVar[dict[int, torch.Tensor]] = {}
        last = None

        @staticmethod
        def forward(ctx, x):
            size = x.shape[-1]
            if size not in Kept.tables:
                Kept.tables[size] = torch.ones(size)
            kept.setdefault(size, torch.ones(size) * 2)
            Kept.last = x
            REMEMBERED.append(x)
            return x * Kept.tables[size] + kept[size] + table(size)

        @staticmethod
        def backward(ctx, grad):
            return grad * 3

    return Kept, kept


def test_no_fake_tensor_is_left_in_class_closure_global_or_memo():
    function, kept = closure()
    table.cache_clear()
    REMEMBERED.clear()
    model, x = CallableModule(lambda model, h: function.apply(h)), torch.randn(3, 4)
    torch2ort.export(model, x)
    assert (function.tables, function.last, kept, REMEMBERED) == ({}, None, {}, [])
    assert type(table(4)) is torch.Tensor
    assert_trains_like_eager(model, [(x,)], steps=2, lr=0.01)


class Leaks(Function):
    """Stores a tensor where no traversal finds it."""

    @staticmethod
    def forward(ctx, x):
        y = x * 2
        keeper().send(y)
        return y * 1

    @staticmethod
    def backward(ctx, grad):
        return grad


def _hold():
    held = []
    while True:
        held.append((yield))


_holder = _hold()
next(_holder)


def keeper():
    return _holder


def test_a_tensor_that_cannot_be_taken_away_is_refused():
    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.export(CallableModule(lambda model, h: Leaks.apply(h)), torch.randn(3, 4))
    assert str(caught.value) == (
        f"{__name__}.Leaks: forward keeps a tensor where an export cannot remove it, and it is not the "
        f"tensor of a run: export runs forward once to learn its outputs. Keep tensors in an attribute of "
        f"the Function, of an argument or of the model, in a global or a closure"
    )


READ = {
    "the model reads argument 1['n'] after {}.Counts.forward": lambda model, h: (
        Counts.apply(h, model.held) * model.held["n"]
    ),
    "the model reads argument 1.seen after {}.Observes.forward": lambda model, h: (
        Observes.apply(h, model.held) * model.held.seen
    ),
    "the model reads argument 1[0] after {}.Appends.forward": lambda model, h: (
        Appends.apply(h, (model.held, {"inner": set()})) * model.held[0]
    ),
}


@pytest.mark.parametrize(
    ("start", "held"), list(zip(READ, ({"n": 1}, Range(), []), strict=True)), ids=["dict", "object", "list"]
)
def test_a_model_that_reads_what_a_function_wrote_is_refused(start, held):
    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.export(CallableModule(READ[start], held), torch.randn(3, 4))
    assert str(caught.value) == (
        f"{start.format(__name__)} wrote to it; a graph does not hold what a Function leaves in Python "
        f"objects. Return it from forward, as a tensor where it varies"
    )


def test_functions_see_what_functions_before_them_wrote():
    def call(model, h):
        return Counts.apply(Counts.apply(h, model.held), model.held) - Counts.apply(h, model.held)

    assert_steps_like_eager(CallableModule(call, {"n": 1}))


def test_an_object_made_anew_for_two_calls_that_write_to_it_is_refused():
    def call(model, h):
        record = {"n": 1}
        return Counts.apply(Counts.apply(h, record), record)

    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.export(CallableModule(call), torch.randn(3, 4))
    assert str(caught.value) == (
        f"{__name__}.Counts: forward writes to argument 1, an object that the model creates in each of "
        f"its calls and passes to several Functions. Let the model hold it in an attribute, or return from "
        f"forward what it writes"
    )


def test_a_held_object_that_is_written_to_is_not_cached(tmp_path):
    model = CallableModule(HELD["dict"][0], {"n": 1})
    exported = torch2ort.export(model, torch.randn(3, 4), cache_dir=tmp_path)
    assert exported.cache.bypass_reason == (
        f"{__name__}.Counts: forward writes to an argument that the model holds."
    )


def test_a_second_backward_observes_nothing():
    eager = CallableModule(lambda model, h: Observes.apply(h, model.held), Range())
    ort = torch2ort.ORTModule(copy.deepcopy(eager))
    for module in (eager, ort):
        output = module(torch.ones(3, 4))
        output.sum().backward(retain_graph=True)
        output.sum().backward()
    assert_same(ort.linear.weight.grad, eager.linear.weight.grad, "weight")
    assert (ort.held.seen, ort.held.low) == (eager.held.seen, eager.held.low)


def test_a_second_backward_behind_a_call_that_writes_to_objects_of_its_own():
    eager = CallableModule(lambda model, h: Counts.apply(h, {"n": 1}))
    ort = torch2ort.ORTModule(copy.deepcopy(eager))
    for module in (eager, ort):
        output = module(torch.ones(3, 4))
        output.sum().backward(retain_graph=True)
        output.sum().backward()
    assert_same(ort.linear.weight.grad, eager.linear.weight.grad, "weight")
