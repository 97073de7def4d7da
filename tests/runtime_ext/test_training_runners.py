"""The runners under onnxruntime-training's own PythonOp and PythonOpGrad kernels."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from onnx import NodeProto, helper

from tests.runtime_ext.calls import error_of, make_site
from tests.runtime_ext.training_graph import (
    LARGE,
    Trainer,
    assert_leaves_no_memory_behind,
    model,
    onnxruntime,
    python_op,
    register,
)
from torch2ort.pythonop.native import native
from torch2ort.runtime import binding

Function = torch.autograd.Function
# Whether aliasing is noticed is test_memory's concern.
pytestmark = pytest.mark.filterwarnings("ignore::torch2ort.errors.Torch2OrtWarning")

_serial = itertools.count()


def site_of(function: type[Function], *arguments: Any, **overrides: Any) -> str:
    """Registers a site for the call and returns its key."""
    site = make_site(function, *arguments, key=f"site{next(_serial)}", **overrides)
    register(site, site.key)
    return site.key


def data() -> torch.Tensor:
    return torch.randn(2, 3, requires_grad=True)


def node(kind: str, inputs: str, output: str) -> NodeProto:
    return helper.make_node(kind, inputs.split(), [output])


def check_training(trainer: Trainer, eager: Callable[[torch.Tensor], torch.Tensor], steps: int = 4) -> None:
    """Trains a few steps both ways; ``eager`` computes ``y`` from ``h = x * w``."""
    for _ in range(steps):
        x, w, gradient = torch.randn(2, 3), torch.randn(2, 3), torch.randn(2, 3)
        leaf = w.clone().requires_grad_()
        expected = eager(x * leaf)
        expected.backward(gradient)
        torch.testing.assert_close(trainer.forward(x, w), expected.detach())
        torch.testing.assert_close(trainer.backward(gradient), leaf.grad)


class Keep(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.view = x.view(-1)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x + ctx.view.view_as(x))


def test_what_a_function_keeps_survives_an_operator_that_runs_in_place() -> None:
    # The planner lets Relu write over h, the last value that it knows to be read.
    nodes = [node("Mul", "x w", "h"), node("Relu", "h", "r"), python_op(site_of(Keep, data()), "h", "p")]
    trainer = Trainer([*nodes, node("Add", "r p", "y")])
    check_training(trainer, lambda h: torch.relu(h) + Keep.apply(h))


class Identity(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def test_a_function_may_return_what_it_is_given() -> None:
    nodes = [node("Mul", "x w", "h"), python_op(site_of(Identity, data()), "h", "p")]
    trainer = Trainer([*nodes, node("Relu", "p", "r"), node("Add", "r p", "y")])
    check_training(trainer, lambda h: torch.relu(Identity.apply(h)) + Identity.apply(h))


class Masked(Function):
    """Takes a bool tensor, returns one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert mask.dtype is torch.bool
        ctx.save_for_backward(mask)
        kept = ~mask
        ctx.mark_non_differentiable(kept)
        return torch.where(mask, x * 2, x), kept

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, nothing: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert nothing.dtype is torch.bool
        (mask,) = ctx.saved_tensors
        return torch.where(mask, gradient * 2, gradient), None


def test_bool_tensors_pass_both_ways() -> None:
    key = site_of(Masked, data(), torch.ones(2, 3, dtype=torch.bool))
    nodes = [node("Mul", "x w", "h"), node("Greater", "h x", "m")]
    nodes += [python_op(key, "hm", "ak", input_types=["float32", "bool"], output_types=["float32", "bool"])]
    trainer = Trainer([*nodes, node("Where", "k a h", "y")])

    x = torch.randn(2, 3)

    def eager(h: torch.Tensor) -> torch.Tensor:
        scaled, kept = Masked.apply(h, h > x)
        return torch.where(kept, scaled, h)

    w, gradient = torch.randn(2, 3).requires_grad_(), torch.randn(2, 3)
    expected = eager(x * w)
    expected.backward(gradient)
    torch.testing.assert_close(trainer.forward(x, w.detach()), expected.detach())
    torch.testing.assert_close(trainer.backward(gradient), w.grad)


class Fail(Function):
    where = ""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if Fail.where == "forward":
            raise KeyError("mine")
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Fail.where == "backward":
            raise KeyError("mine")
        return gradient * 2


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_arrives_with_the_users_line(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer([node("Mul", "x w", "h"), python_op(site_of(Fail, data()), "h", "y")])
    x = torch.ones(2, 3)
    monkeypatch.setattr(Fail, "where", where)
    error = error_of(lambda: (trainer.forward(x, x), trainer.backward(x)))
    assert (type(error), error.args) == (KeyError, ("mine",))
    traceback = error.__traceback__
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    assert traceback.tb_frame.f_code is getattr(Fail, where).__code__
    assert native.take_error() is None
    monkeypatch.setattr(Fail, "where", "")
    check_training(trainer, Fail.apply)


def test_an_exception_that_nobody_took_is_not_mistaken_for_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = Trainer([node("Mul", "x w", "h"), python_op(site_of(Fail, data()), "h", "y")])
    monkeypatch.setattr(Fail, "where", "forward")
    monkeypatch.setattr(native, "take_error", lambda: None)
    error_of(trainer.forward, torch.ones(2, 3), torch.ones(2, 3))
    monkeypatch.undo()
    native.begin(None)
    assert native.take_error() is None


def test_a_callback_that_is_no_site_is_refused() -> None:
    register(Fail.apply, "no site")
    trainer = Trainer([node("Mul", "x w", "h"), python_op("no site", "h", "y")])
    error = error_of(trainer.forward, torch.ones(2, 3), torch.ones(2, 3))
    assert isinstance(error, TypeError)
    assert str(error) == "the callback registered for no site is neither a Site nor a Chain"


def test_a_backward_without_its_run_is_refused() -> None:
    trainer = Trainer([node("Mul", "x w", "h"), python_op(site_of(Keep, data()), "h", "y")])
    trainer.forward(torch.ones(2, 3), torch.ones(2, 3))
    trainer.run = native.Run()
    error = error_of(trainer.backward, torch.ones(2, 3))
    assert str(error).startswith(
        f"{__name__}.Keep: backward was called, but the current run holds no context"
    )


def detach(name: str) -> NodeProto:
    return helper.make_node("ATen", ["h"], ["d"], domain="org.pytorch.aten", operator=name, overload_name="")


def test_detach_passes_values_and_stops_gradients() -> None:
    nodes = [node("Mul", "x w", "h"), detach("detach"), node("Mul", "h d", "y")]
    check_training(Trainer(nodes), lambda h: h * h.detach())


def test_another_aten_operator_is_refused() -> None:
    binding.install_runners()
    proto = model([node("Mul", "x w", "h"), detach("detach_copy"), node("Mul", "h d", "y")], (2, 3))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
    x = torch.ones(2, 3).numpy()
    error = error_of(session.run, ["y"], {"x": x, "w": x})
    assert "torch2ort executes no ATen operator but detach, not detach_copy" in str(error)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("backward", [True, False], ids=["with backward", "forward alone"])
@pytest.mark.parametrize("protected", [(), (0,)], ids=["own copy", "the runtime's memory"])
def test_steps_leave_no_memory_behind(backward: bool, protected: tuple[int, ...]) -> None:
    key = site_of(Keep, data(), protected_inputs=protected)
    trainer = Trainer([node("Mul", "x w", "h"), python_op(key, "h", "y")], LARGE)
    assert_leaves_no_memory_behind(trainer, backward=backward)


def test_inference_keeps_no_context_and_pays_for_the_none_that_onnxruntime_releases() -> None:
    site = make_site(Keep, data(), key="inference", training=False)
    register(site, site.key)
    proto = model([node("Mul", "x w", "h"), python_op("inference", "h", "y", training=False)], (2, 3))
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    x = torch.randn(2, 3)
    feeds = {"x": x.numpy(), "w": x.numpy()}
    (y,) = session.run(["y"], feeds)
    torch.testing.assert_close(torch.from_numpy(y), (x * x) ** 2)
    before = sys.getrefcount(None)
    for _ in range(1000):
        session.run(["y"], feeds)
    held = sys.getrefcount(None) - before
    # From Python 3.12 on None is not counted.
    assert held == 0 or held >= 1000
