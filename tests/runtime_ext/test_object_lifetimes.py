"""No object leaks, is freed too early, or is shared between threads by mistake."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from typing import Any

import pytest
import torch

from tests.runtime_ext.calls import (
    InRun,
    check_against_eager,
    error_of,
    make_site,
    run_backward,
    run_eager,
    run_forward,
)
from torch2ort.pythonop.native import native

Function = torch.autograd.Function


class Scale(Function):
    """Uses every kind of reference: saved, attribute, constant, output that is not a tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, constant: object) -> tuple[torch.Tensor, object]:
        ctx.save_for_backward(x, None, x.exp())
        ctx.constant, ctx.me = constant, ctx
        return x * 2, constant

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, nothing: None) -> tuple[torch.Tensor, None]:
        x, _, exp = ctx.saved_tensors
        return gradient * 2 + x + exp, None


class Fail(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, in_forward: bool) -> torch.Tensor:
        ctx.x = x
        if in_forward:
            raise KeyError("forward of the user")
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise LookupError("backward of the user")


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


def test_thousands_of_calls_leave_no_object_behind() -> None:
    constant = object()
    x = torch.randn(3, requires_grad=True)
    site = make_site(Scale, x, constant)

    def step() -> None:
        with InRun():
            run_forward(site, x)
            run_backward(site, torch.ones(3))
        with InRun():
            run_forward(site, x)
            run_backward(site, None)

    for _ in range(10):
        step()
    before = live_tensors(), sys.getrefcount(constant), sys.getrefcount(site)
    for _ in range(2_500):  # four calls each
        step()
    assert (live_tensors(), sys.getrefcount(constant), sys.getrefcount(site)) == before


def test_forwards_without_backward_leave_no_object_behind() -> None:
    x = torch.randn(3, requires_grad=True)
    site = make_site(Scale, x, None)
    before = live_tensors()
    for _ in range(1000):
        native.begin(native.Run())
        run_forward(site, x)
    native.begin(None)
    assert live_tensors() == before


@pytest.mark.parametrize("in_forward", [True, False])
def test_failing_calls_leave_no_object_behind(in_forward: bool) -> None:
    x = torch.randn(3, requires_grad=True)
    site = make_site(Fail, x, False, arguments=(None, in_forward))
    before = live_tensors()
    for _ in range(100):
        with InRun():
            error = error_of(lambda: (run_forward(site, x), run_backward(site, torch.ones(3))))
            assert isinstance(error, LookupError)
            del error
    assert live_tensors() == before


def test_what_forward_keeps_goes_with_the_run() -> None:
    storages: list[Any] = []

    class Keep(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.view = x[1:]
            storages.append(weakref.ref(x.untyped_storage()))
            return x * 2

    site = make_site(Keep, torch.ones(3, requires_grad=True))
    with InRun() as run:
        native.call_forward(site, [torch.ones(3)])
        assert storages[-1]() is not None
        run.clear()
        gc.collect()
        assert storages[-1]() is None


def test_outputs_outlive_run_and_site() -> None:
    site = make_site(Scale, torch.ones(3, requires_grad=True), None)
    with InRun():
        (y,) = native.call_forward(site, [torch.full((3,), 4.0)])
    del site
    gc.collect()
    assert y.tolist() == [8.0] * 3


def test_threads_have_runs_of_their_own() -> None:
    x = torch.randn(4, requires_grad=True)
    expected = run_eager(Scale, [x, None], [torch.ones(4)])[1][0]
    problems: list[Any] = []

    def work() -> None:
        site = make_site(Scale, x, None)
        for _ in range(200):
            with InRun() as run:
                run_forward(site, x)
                contexts = len(run)
                (gradient,) = run_backward(site, torch.ones(4))
                if contexts != 1 or not torch.equal(gradient, expected):
                    problems.append(gradient)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_threads_may_share_a_site() -> None:
    x = torch.randn(4, requires_grad=True)
    site = make_site(Scale, x, None)
    problems: list[Exception] = []

    def work() -> None:
        try:
            for _ in range(200):
                with InRun():
                    run_forward(site, x)
                    run_backward(site, torch.ones(4))
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (problems, site.calls) == ([], 800)


def test_a_call_inside_a_function_has_its_own_run() -> None:
    inner = make_site(Scale, torch.ones(3, requires_grad=True), None)

    class Outer(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            with InRun():
                run_forward(inner, x)
                (gradient,) = run_backward(inner, torch.ones(3))
            return x + gradient

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 1

    check_against_eager(Outer, torch.randn(3, requires_grad=True), gradients=[torch.ones(3)])


def test_an_interpreter_ends_well_with_contexts_alive() -> None:
    script = """
        import torch
        from tests.runtime_ext.calls import make_site, native
        from tests.runtime_ext.test_object_lifetimes import Scale

        site = make_site(Scale, torch.ones(3, requires_grad=True), None)
        run = native.Run()
        native.begin(run)
        native.call_forward(site, [torch.ones(3)])
        print(len(run))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_an_exception_keeps_its_identity_and_the_users_line() -> None:
    x = torch.randn(3, requires_grad=True)
    raised = KeyError("mine")

    class Raise(Function):
        active = False

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if Raise.active:
                raise raised
            return x * 2

    site = make_site(Raise, x)
    Raise.active = True
    error = error_of(run_forward, site, x)
    assert error is raised
    traceback = error.__traceback__
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    assert traceback.tb_frame.f_code is Raise.forward.__code__
