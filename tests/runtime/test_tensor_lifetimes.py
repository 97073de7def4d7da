"""Tensors from ONNX Runtime keep their values in PyTorch, whatever is run or freed afterwards."""

from __future__ import annotations

import copy
from typing import ClassVar

import onnxruntime
import pytest
import torch

import torch2ort
from tests.support.comparison import assert_same, assert_trains_like_eager
from tests.support.functions import Square


class Statistics(torch.nn.Module):
    """Its buffer's new value is computed in place, and small tensors of the same size follow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.register_buffer("average", torch.zeros(2))

    def forward(self, x):
        hidden = self.layer(x)
        self.average.copy_(self.average * 0.5 + hidden.detach().mean(0) * 0.5 + x.shape[0] / 7)
        for _ in range(4):
            hidden = torch.relu(torch.tanh(hidden) * hidden.detach() + self.layer.bias * 0.5)
        return hidden


def test_written_buffers_and_detached_values_keep_their_memory():
    batches = [(torch.randn(n, 2),) for n in (3, 5, 4, 6)]
    assert_trains_like_eager(Statistics(), batches, steps=8, lr=0.01)


def test_outputs_outlive_the_backward_and_the_module():
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4), torch.nn.Tanh()
    )
    ort = torch2ort.ORTModule(copy.deepcopy(model))
    xs = [torch.randn(3, 4) for _ in range(10)]
    kept = []
    for x in xs:
        y = ort(x)
        y.sum().backward()
        kept.append(y.detach())
    del ort, y
    junk = [torch.randn(3, 4) for _ in range(200)]
    for x, y in zip(xs, kept, strict=True):
        assert_same(y, model(x).detach(), "output")
    del junk


def test_gradients_do_not_share_memory():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    ort = torch2ort.ORTModule(model)
    ort(torch.randn(3, 4)).sum().backward()
    addresses = [p.grad.data_ptr() for p in ort.parameters()]
    assert len(set(addresses)) == len(addresses)


class Shelf(torch.autograd.Function):
    """Returns, in forward and backward, tensors that it also keeps for later calls."""

    kept: ClassVar[dict[str, torch.Tensor]] = {}

    @staticmethod
    def forward(ctx, x):
        return Shelf.take("value", x, 2.0)

    @staticmethod
    def backward(ctx, grad):
        return Shelf.take("gradient", grad, 3.0)

    @staticmethod
    def take(name, like, number):
        # An export may call it on tensors without memory, which must not be kept.
        if type(like) is not torch.Tensor:
            return torch.full_like(like, number)
        return Shelf.kept.setdefault(name, torch.full_like(like, number))


class Kept(torch.nn.Module):
    """Operators that could overwrite the Function's results, in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, x):
        return torch.sqrt(Shelf.apply(torch.tanh(self.layer(x))) * 3.0 + x.abs()) * 2


def run_exported(model, x):
    exported = torch2ort.export(model.eval(), x)
    Shelf.kept.clear()
    return lambda: exported(x)


def run_session(model, x):
    exported = torch2ort.export(model.eval(), x)
    session = exported.session()
    Shelf.kept.clear()
    return lambda: torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


def run_session_with_options(model, x):
    options = onnxruntime.SessionOptions()
    session = torch2ort.export(model.eval(), x).session(session_options=options)
    Shelf.kept.clear()
    return lambda: torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


def run_evaluation(model, x):
    wrapped = torch2ort.ORTModule(model).eval()

    def run():
        with torch.no_grad():
            return wrapped(x)

    return run


def run_training(model, x):
    wrapped = torch2ort.ORTModule(model)

    def run():
        result = wrapped(x)
        result.sum().backward()
        return result

    return run


@pytest.mark.parametrize(
    "start", [run_exported, run_session, run_session_with_options, run_evaluation, run_training]
)
def test_what_a_function_returns_and_keeps_is_never_written_over(start):
    Shelf.kept.clear()
    x = torch.randn(64, 64)
    run = start(Kept(), x)
    expected = torch.sqrt(2.0 * 3.0 + x.abs()) * 2
    for _ in range(3):
        assert_same(run().detach(), expected, "output")
    for name, kept in Shelf.kept.items():
        assert_same(kept, torch.full_like(kept, 2.0 if name == "value" else 3.0), name)


class Twice(torch.nn.Module):
    """A product that a Function keeps, and an equal one that an operator may overwrite."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64, bias=False)

    def forward(self, x):
        kept = Square.apply(self.layer(x))
        return kept + torch.tanh(self.layer(x))


def test_a_product_that_is_merged_with_its_twin_stays_as_it_was():
    assert_trains_like_eager(Twice(), [(torch.randn(64, 64),)], steps=4, lr=0.01)
