"""Objects of Python's, NumPy's and torch's own classes in a model: their state is guarded, too."""

from __future__ import annotations

import array
import collections
import collections.abc
import concurrent.futures
import configparser
import contextlib
import contextvars
import copy
import csv
import ctypes
import decimal
import io
import multiprocessing
import queue
import string
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import torch2ort
from tests.support.comparison import assert_same
from tests.support.sweeps import sample_cases
from tests.variants.model_changes import Reads

distributions = torch.distributions
VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("variable", default=1.0)


class OwnQueue(queue.Queue):
    """A user's subclass of one of Python's classes."""


class OwnNormal(distributions.Normal):
    """A user's subclass of one of torch's classes."""


class Pairs(collections.abc.Sequence):
    """A user's subclass of a Python class without attributes."""

    def __init__(self) -> None:
        self.following = iter([1, 2])

    def __getitem__(self, i):
        return i

    def __len__(self) -> int:
        return 2


class Clock(threading.Thread):
    """A thread that records when it woke, as tqdm has one."""

    scale = 2.0

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.noted = 0.0

    def tick(self) -> None:
        """Wake up."""
        self.noted += 1.0


def settings() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser["all"] = {"scale": "1.0"}
    return parser


def scheduler() -> torch.optim.lr_scheduler.LRScheduler:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    made = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    return made


def set_entry(held: Any, number: int) -> None:
    held["scale"] = number


def set_first(held: Any, number: int) -> None:
    held[0] = number


def set_mean(held: Any, number: int) -> None:
    held.loc = torch.tensor(float(number))


# Functions that make an object, read it in forward, and change it between calls.
CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any, int], Any]]] = {
    "ChainMap": (lambda: collections.ChainMap({}, {"scale": 1}), lambda m: m["scale"], set_entry),
    "ConfigParser": (
        settings,
        lambda p: p.getfloat("all", "scale"),
        lambda p, n: p["all"].__setitem__("scale", str(n)),
    ),
    "ContextVar": (lambda: VARIABLE, lambda v: v.get(), lambda v, n: v.set(float(n))),
    "Context": (decimal.Context, lambda c: c.prec, lambda c, n: setattr(c, "prec", n)),
    "Event": (threading.Event, lambda e: 2.0 if e.is_set() else 1.0, lambda e, n: e.set()),
    "GradScaler": (
        lambda: torch.amp.GradScaler("cpu", enabled=True),
        lambda s: s.get_scale(),
        lambda s, n: s.load_state_dict({**s.state_dict(), "scale": float(n)}),
    ),
    "LRScheduler": (scheduler, lambda s: s.get_last_lr()[0], lambda s, n: s.step()),
    "Normal": (
        lambda: distributions.Normal(0.0, 1.0, validate_args=False),
        lambda d: d.log_prob(torch.tensor(0.5)),
        set_mean,
    ),
    "subclass of Normal": (
        lambda: OwnNormal(0.0, 1.0, validate_args=False),
        lambda d: d.log_prob(torch.tensor(0.5)),
        set_mean,
    ),
    "Categorical": (
        lambda: distributions.Categorical(logits=torch.zeros(4)),
        lambda d: d.logits,
        lambda d, n: setattr(d, "logits", torch.full((4,), float(n))),
    ),
    "Polynomial": (
        lambda: np.polynomial.Polynomial([1.0, 2.0]),
        lambda p: float(p(1.0)),
        lambda p, n: p.coef.fill(n),
    ),
    "Queue": (queue.Queue, lambda q: q.qsize() + 1, lambda q, n: q.put(n)),
    "subclass of Queue": (OwnQueue, lambda q: q.qsize() + 1, lambda q, n: q.put(n)),
    "Template": (
        lambda: string.Template("1"),
        lambda t: float(t.substitute()),
        lambda t, n: setattr(t, "template", str(n)),
    ),
    "a number of C": (
        lambda: ctypes.c_int(1),
        lambda c: c.value,
        lambda c, n: setattr(c, "value", n),
    ),
    "an array of C": (lambda: (ctypes.c_double * 2)(1.0, 2.0), lambda a: a[0], set_first),
    "memory of several processes": (
        lambda: multiprocessing.Value("d", 1.0),
        lambda v: v.value,
        lambda v, n: setattr(v, "value", n),
    ),
    "masked array": (lambda: np.ma.array([1.0]), lambda a: float(a.sum()), set_first),
    "record array": (
        lambda: np.rec.array([(1.0,)], dtype=[("scale", "f8")]),
        lambda a: float(a.scale[0]),
        lambda a, n: a.scale.fill(n),
    ),
    "memoryview": (lambda: memoryview(bytearray(b"1")), lambda m: m[0], set_first),
}


@pytest.mark.parametrize("name", sample_cases(CHANGES, 2))
def test_what_an_object_holds_is_compared_before_each_call(name: str):
    make, read, change = CHANGES[name]
    VARIABLE.set(1.0)
    model = Reads(lambda m, h: h * read(m.held), held=make())
    wrapped = torch2ort.ORTModule(model)
    x = torch.randn(3, 4)
    for number in range(2, 5):
        with torch.no_grad():
            assert_same(wrapped(x), model(x), f"result before it is {number}")
        change(model.held, number)


def test_what_a_view_of_a_dictionary_shows_is_compared_before_each_call():
    scales = {"scale": 1.0}
    model = Reads(lambda m, h: h * sum(m.held), held=scales.values())
    wrapped = torch2ort.ORTModule(model)
    x = torch.randn(3, 4)
    for number in range(2, 5):
        assert_same(wrapped(x), model(x), f"result before it is {number}")
        scales["scale"] = float(number)


STEPPING = {
    "BytesIO": (lambda: io.BytesIO(b"123"), lambda b: float(b.read(1))),
    "SimpleQueue": (queue.SimpleQueue, lambda q: q.qsize() + 1),
    "StringIO": (lambda: io.StringIO("1\n2\n"), lambda s: float(s.readline())),
    "flatiter": (lambda: np.arange(3).flat, lambda f: float(next(f))),
    "reader": (lambda: csv.reader(["1,2", "3,4"]), lambda r: float(next(r)[0])),
}


@pytest.mark.parametrize("kind", STEPPING)
def test_what_steps_on_unseen_is_refused_by_name(kind: str):
    make, read = STEPPING[kind]
    model = Reads(lambda m, h: h * read(m.held), held=make())
    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.ORTModule(model)(torch.randn(3, 4))
    assert str(caught.value) == (
        f"Reads: module (the model), attribute held: a {kind} advances without exposing its position. Keep "
        "the values in a list, or pass them as arguments. If it never changes, pass "
        'torch2ort.Options(guards="trust")'
    )


def filled() -> queue.Queue[int]:
    numbers: queue.Queue[int] = queue.Queue()
    for number in range(9):
        numbers.put(number)
    return numbers


def increase(held: Any) -> float:
    held.value += 1
    return held.value


TAKEN = {
    "Event": (threading.Event, lambda e: e.set() or 1.0),
    "Queue": (filled, lambda q: q.get()),
    "Semaphore": (lambda: threading.Semaphore(9), lambda s: float(s.acquire())),
    "a number of C": (lambda: ctypes.c_int(1), increase),
    "memory of several processes": (lambda: multiprocessing.Value("d", 1.0), increase),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_forward_changes_in_such_an_object_is_refused(name: str):
    make, take = TAKEN[name]
    model = Reads(lambda m, h: h * take(m.held), held=make())
    with pytest.raises(torch2ort.ExportError, match=r"(draws from|writes to) Reads\.held"):
        torch2ort.ORTModule(model)(torch.randn(3, 4))


HARMLESS: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], Any]]] = {
    "a pool of threads": (lambda: concurrent.futures.ThreadPoolExecutor(1), lambda p, h: h if p else h * 2),
    "torch.autocast": (lambda: torch.autocast("cpu", enabled=False), lambda a, h: within(a, h)),
    "torch.no_grad": (torch.no_grad, lambda a, h: within(a, h)),
    "a sequence of a user's, with an iterator": (Pairs, lambda s, h: h * len(s)),
    "a lock": (threading.Lock, lambda a, h: within(a, h)),
    "a semaphore": (lambda: threading.Semaphore(2), lambda a, h: within(a, h)),
    "a transform that keeps its last result": (
        lambda: distributions.TanhTransform(cache_size=1),
        lambda t, h: t.log_abs_det_jacobian(h, t(h)),
    ),
    "a distribution that computes when asked": (
        lambda: distributions.Categorical(logits=torch.tensor([0.1, 0.2, 0.3, 0.4])),
        lambda d, h: h * d.probs,
    ),
    "an expanded number": (
        lambda: distributions.Normal(torch.zeros(1), 1.0, validate_args=False),
        lambda d, h: d.log_prob(h),
    ),
}


def within(held: Any, h: torch.Tensor) -> torch.Tensor:
    with held:
        return h * 2


@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_not_change_needs_one_graph(name: str):
    make, read = HARMLESS[name]
    model = Reads(lambda m, h: read(m.held, h), held=make())
    # Eager PyTorch may cache results in the object.
    eager = Reads(model.compute, held=make())
    eager.layer = model.layer
    wrapped = torch2ort.ORTModule(model)
    graphs = set()
    for _ in range(3):
        x = torch.randn(3, 4)
        assert_same(wrapped(x), eager(x), "result")
        graphs.add(id(wrapped.exported))
    assert len(graphs) == 1


def test_what_a_thread_notes_for_itself_needs_no_graph():
    model = Reads(lambda m, h: h * m.held.scale, held=Clock())
    wrapped = torch2ort.ORTModule(model)
    graphs = set()
    for _ in range(3):
        wrapped(torch.randn(3, 4))
        model.held.tick()
        graphs.add(id(wrapped.exported))
    assert len(graphs) == 1


GROWING: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "array": (lambda: array.array("d", [1.0]), lambda a: a.append(2.0)),
    "bytearray": (lambda: bytearray(b"1"), lambda b: b.append(2)),
    "c_int": (lambda: ctypes.c_int(1), increase),
    "memoryview": (lambda: memoryview(bytearray(b"1")), lambda m: set_first(m, m[0] + 1)),
}


@pytest.mark.parametrize("name", GROWING)
def test_memory_that_forward_writes_to_is_as_it_was_behind_a_refusal(name: str):
    make, write = GROWING[name]
    model = Reads(lambda m, h: (write(m.held), h)[1], held=make())
    with pytest.raises(torch2ort.ExportError, match=r"writes to Reads\.held"):
        torch2ort.ORTModule(model)(torch.randn(3, 4))
    assert bytes(memoryview(model.held)) == bytes(memoryview(make()))


class Kept:
    """A user's class with an attribute that torch's transforms also have."""

    def __init__(self) -> None:
        self._cached_x_y = 1.0


def test_an_attribute_of_a_users_class_counts_whatever_its_name():
    model = Reads(lambda m, h: h * m.held._cached_x_y, held=Kept())
    wrapped = torch2ort.ORTModule(model)
    x = torch.randn(3, 4)
    for number in (2.0, 3.0):
        model.held._cached_x_y = number
        assert_same(wrapped(x), model(x), f"result for {number}")


def test_an_export_leaves_nothing_in_a_distribution():
    held = distributions.Categorical(logits=torch.randn(4))
    model = Reads(lambda m, h: h * m.held.probs, held=held)
    before = copy.copy(vars(held))
    torch2ort.ORTModule(model)(torch.randn(3, 4))
    assert vars(held) == before


@contextlib.contextmanager
def doubled(scales: dict[str, float]):
    scales["scale"] *= 2
    try:
        yield
    finally:
        scales["scale"] /= 2


SCALE = {"scale": 1.0}


class Decorated(torch.nn.Module):
    """Code that reads attributes by computed names, and a method with a decorator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    @doubled(SCALE)
    def scaled(self, h):
        return h * SCALE["scale"]

    def forward(self, x):
        return self.scaled(getattr(self, "lay" + "er")(x))


def test_a_context_manager_may_decorate_what_a_model_reads_by_any_name():
    model = Decorated()
    wrapped = torch2ort.ORTModule(model)
    x = torch.randn(3, 4)
    for scale in (1.0, 3.0):
        SCALE["scale"] = scale
        assert_same(wrapped(x), model(x), f"result for {scale}")


def test_a_context_manager_that_serves_once_raises_eagers_error_the_second_time():
    def make() -> Reads:
        return Reads(lambda m, h: within(m.held, h), held=doubled({"scale": 1.0}))

    eager, wrapped = make(), torch2ort.ORTModule(make())
    x = torch.randn(3, 4)
    eager(x), wrapped(x)
    errors = []
    for module in (eager, wrapped):
        with pytest.raises(AttributeError) as caught:
            module(x)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
