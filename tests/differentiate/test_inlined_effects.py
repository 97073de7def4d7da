"""A Function that does more than compute, in forward or backward, is not inlined."""

from __future__ import annotations

import logging
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import torch2ort
from tests.support.sweeps import sample_cases

LOGGER = logging.getLogger(__name__)
SCALE = torch.ones(())
SEEN: list = []
FACTOR = 2
HELD = SimpleNamespace(calls=0, numbers=[])


def halves():
    SCALE.mul_(0.5)


def sets_data():
    SCALE.data = SCALE.data * 0.5


def appends():
    SEEN.append(torch.ones(()))


def counts():
    HELD.calls += 1


def draws():
    HELD.numbers[:] = []
    random.random()


def draws_from_numpy():
    np.random.rand()


def seeds():
    torch.manual_seed(3)


def prints():
    print("here")


def writes_a_file():
    with open(HELD.path, "a") as file:
        file.write("x")


def logs():
    LOGGER.warning("here")


def asks_the_clock():
    time.time()


DOES = {
    halves: "writes to a tensor that is none of its arguments",
    sets_data: "it writes to the global SCALE",
    appends: "it writes to the global SEEN",
    counts: "it writes to the global HELD.calls",
    draws: "it draws from Python's random generator, or seeds it",
    draws_from_numpy: "it draws from numpy's random generator, or seeds it",
    seeds: "sets torch's random state",
    prints: "calls print, which no graph does",
    writes_a_file: "calls open, which no graph does",
    logs: "calls a logger, which no graph does",
    asks_the_clock: "calls time, which no graph does",
}
WORLD = (prints, writes_a_file, logs, asks_the_clock, seeds)


def doing(*, forward=lambda: None, backward=lambda: None):
    class Does(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            forward()
            return x * 2 * SCALE.sum()

        @staticmethod
        def backward(ctx, grad):
            backward()
            return grad * 3 * SCALE.sum() * (1 + len(SEEN) + HELD.calls)

    return Does


class Model(torch.nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.function = function

    def forward(self, x):
        return self.function.apply(self.linear(x))


X = torch.randn(3, 4)


@pytest.fixture(autouse=True)
def _as_before(tmp_path):
    yield
    _reset(tmp_path)


def _reset(folder):
    HELD.calls, HELD.path = 0, folder / "written"
    HELD.path.unlink(missing_ok=True)
    SEEN.clear()
    SCALE.data = torch.ones(())
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)


def left(module, folder, capsys, caplog):
    """The results of two steps, and the effects that they leave."""
    _reset(folder)
    caplog.clear()
    given = []
    for _ in range(2):
        module.zero_grad()
        y = module(X)
        y.sum().backward()
        given += [y.detach(), module.linear.weight.grad.clone(), SCALE.clone()]
    file = HELD.path.read_text() if HELD.path.exists() else ""
    logged = [r.message for r in caplog.records if r.name == __name__]
    state = [random.random(), np.random.rand(), torch.rand(()), capsys.readouterr().out, file, logged]
    return given, [*map(type, SEEN)], HELD.calls, state


@pytest.mark.parametrize("does", sample_cases(DOES, 2), ids=lambda d: d.__name__)
def test_with_the_option_it_stays_opaque(does, tmp_path, capsys, caplog):
    model = Model(doing(backward=does))
    expected = left(model, tmp_path, capsys, caplog)
    module = torch2ort.ORTModule(model, options=torch2ort.Options(inline_functions=True))
    found = left(module, tmp_path, capsys, caplog)
    torch.testing.assert_close(found[0], expected[0])
    assert found[1:] == expected[1:]


def refused(function, reason):
    torch2ort.register_inline(function)
    module = torch2ort.ORTModule(Model(function))
    torch.manual_seed(5)
    full = f"{function.__module__}.{function.__qualname__}"
    try:
        with pytest.raises(torch2ort.ExportError) as error:
            module(X).sum().backward()
        assert str(error.value) == (
            f"{full} is registered with register_inline, but {reason}. Take that back with "
            f"torch2ort.unregister('{full}'), so that its calls stay opaque"
        )
    finally:
        torch2ort.unregister(function)


@pytest.mark.parametrize("does", DOES, ids=lambda d: d.__name__)
def test_it_is_refused_where_it_is_registered_and_leaves_nothing(does, tmp_path, capsys):
    _reset(tmp_path)
    reason = DOES[does]
    refused(doing(backward=does), reason if reason.startswith("it ") else f"its backward {reason}")
    assert (SEEN, HELD.calls, HELD.path.exists(), capsys.readouterr().out) == ([], 0, False, "")
    torch.testing.assert_close(SCALE, torch.ones(()))
    drawn = random.random(), np.random.rand(), torch.rand(())
    _reset(tmp_path)
    assert drawn == (random.random(), np.random.rand(), torch.rand(()))


@pytest.mark.parametrize("does", WORLD, ids=lambda d: d.__name__)
def test_so_is_what_forward_does(does, tmp_path):
    _reset(tmp_path)
    refused(doing(forward=does), f"its forward {DOES[does]}")


def test_the_type_of_a_tensor_is_that_of_eager_pytorch():
    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * (2 if type(x) is torch.Tensor and isinstance(type(x), type) else 3)

        @staticmethod
        def backward(ctx, grad):
            return grad * (2 if type(grad) is torch.Tensor else 3) * (5 if type(FACTOR) is int else 7)

    torch2ort.register_inline(Asks)
    try:
        model = Model(Asks)
        given = []
        for module in (torch2ort.ORTModule(model), model):
            module.zero_grad()
            y = module(X)
            y.sum().backward()
            given.append([y.detach(), model.linear.weight.grad.clone()])
        torch.testing.assert_close(*given)
        assert "type" not in globals()
    finally:
        torch2ort.unregister(Asks)
