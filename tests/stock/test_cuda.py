"""On CUDA a Function runs on onnxruntime's stream, with eager PyTorch's results, after ``try_cuda``.

Without a GPU, the library runs on an emulated device (tests.stock.fake_runtime).
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from typing import Any, ClassVar

import onnxruntime
import pytest
import torch

import torch2ort
from tests.support.functions import Affine, Square
from torch2ort.runtime import stock

needs_cuda = pytest.mark.skipif(
    "CUDAExecutionProvider" not in onnxruntime.get_available_providers(),
    reason="this onnxruntime has no CUDAExecutionProvider",
)
ENTER = "enter stream 0x5eed of device 0"


@pytest.fixture(scope="module")
def emulated() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.stock.emulated_cuda_calls"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_is_refused_until_asked_for(emulated):
    assert emulated["refusal"]["error"] == (
        "PythonOp __main__.Scale (node 'PythonOp_0'): Functions on the CUDAExecutionProvider were never run "
        "on a GPU by torch2ort's tests; use the CPUExecutionProvider, or call "
        "torch2ort.runtime.stock.try_cuda() and compare with eager"
    )


def test_a_function_runs_on_the_runtimes_stream_and_the_host_touches_nothing(emulated):
    assert emulated["calls"]["second"] == [ENTER, "forward", "copy_(non_blocking=True)", "exit"]


def test_a_first_call_works_on_a_copy_made_on_the_stream(emulated):
    assert emulated["calls"]["first"] == [ENTER, "clone", "forward", "copy_(non_blocking=True)", "exit"]


def test_results_are_eagers_on_the_emulated_device(emulated):
    assert emulated["calls"]["equal"]


def test_who_reads_the_context_gets_memory_for_one_number(emulated):
    assert emulated["calls"]["context"] == [1]


def test_a_function_that_raises_leaves_the_stream(emulated):
    assert emulated["failure"] == {
        "events": [ENTER, "clone", "exit"],
        "error": "PythonOp __main__.Fail (node 'PythonOp_0'): ValueError: mine",
    }


def test_what_a_function_keeps_is_not_overwritten(emulated):
    assert emulated["keeping"]["intact"] == [True, True, True]


def test_an_output_on_another_device_is_refused(emulated):
    assert emulated["other device"]["error"] == (
        "PythonOp __main__.OnHost (node 'PythonOp_0'): EngineError: __main__.OnHost: output 0 of forward is "
        "on cpu, but its first tensor argument is on cuda:0"
    )


@pytest.fixture
def capturing(monkeypatch) -> list[bool]:
    """PyTorch's streams, replaced; whether one captures a graph."""
    state = [False]
    monkeypatch.setattr(stock, "_external_stream", lambda address, device: (address, device))
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state[0])
    return state


def test_a_call_may_enter_a_stream_that_captures_nothing(capturing):
    with stock._on_stream(1, 0):
        capturing.append(True)
    assert capturing == [False, True]


def test_a_run_that_is_captured_as_a_graph_is_refused(capturing):
    capturing[0] = True
    with pytest.raises(torch2ort.EngineError) as caught, stock._on_stream(1, 0):
        pass
    assert str(caught.value) == (
        "onnxruntime captures this run as a CUDA graph, whose replays would not call the Functions in it; "
        "make the session without the provider option enable_cuda_graph"
    )


class Streams(torch.autograd.Function):
    """Records the stream that it runs on, and fails where PyTorch waits for the device."""

    seen: ClassVar[list[int]] = []

    @staticmethod
    def forward(ctx, x):
        if type(x) is not torch.Tensor or not x.is_cuda:
            return x * 3.0
        Streams.seen.append(torch.cuda.current_stream().cuda_stream)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return x * 3.0
        finally:
            torch.cuda.set_sync_debug_mode("default")


class Fail(torch.autograd.Function):
    error: ClassVar[ValueError] = ValueError("mine")

    @staticmethod
    def forward(ctx, x):
        if type(x) is torch.Tensor and Fail.arm_guards:
            raise Fail.error
        return x * 1.0

    arm_guards: ClassVar[bool] = False


class Keep(torch.autograd.Function):
    kept: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx, x):
        Keep.kept.append(x)
        return x + 1.0


class Model(torch.nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 100))
        self.body = body

    def forward(self, x):
        return torch.relu(self.body(x * 2.0, self.weight)) + 1.0


BODIES = {
    "one Function": lambda x, w: Square.apply(x),
    "Functions behind each other": lambda x, w: Affine.apply(Square.apply(x), w),
    "Functions with an operator between": lambda x, w: Square.apply(torch.tanh(Square.apply(x))),
}


@pytest.fixture(
    params=[
        "CPUExecutionProvider",
        pytest.param("CUDAExecutionProvider", marks=[pytest.mark.cuda, needs_cuda]),
    ]
)
def provider(request) -> str:
    """A provider; the run on the CPU shows that the tests themselves are right."""
    if request.param == "CUDAExecutionProvider":
        stock.try_cuda()
    return request.param


def session_of(body, provider: str) -> tuple[torch.nn.Module, Any, str]:
    model = Model(body).eval()
    exported = torch2ort.export(model, torch.ones(3, 100))
    session = exported.session(providers=[provider, *({"CPUExecutionProvider"} - {provider})])
    return model, session, session.get_inputs()[0].name


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_results_are_eagers(provider, body):
    model, session, name = session_of(body, provider)
    for _ in range(5):
        x = torch.randn(3, 100)
        (y,) = session.run(None, {name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(y), model(x).detach())


def test_bound_tensors_stay_on_their_device(provider):
    model, session, name = session_of(BODIES["one Function"], provider)
    device = "cuda" if provider.startswith("CUDA") else "cpu"
    x = torch.randn(3, 100)
    binding = session.io_binding()
    binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(x.numpy(), device, 0))
    binding.bind_output(session.get_outputs()[0].name, device)
    session.run_with_iobinding(binding)
    (y,) = binding.get_outputs()
    assert y.device_name() == device
    torch.testing.assert_close(torch.from_numpy(y.numpy()), model(x).detach())


def test_an_exception_arrives_as_the_same_object(provider):
    _, session, name = session_of(lambda x, w: Fail.apply(x), provider)
    Fail.arm_guards = True
    with pytest.raises(ValueError, match="mine") as caught:
        session.run(None, {name: torch.ones(3, 100).numpy()})
    Fail.arm_guards = False
    assert caught.value is Fail.error


def test_kept_arguments_outlive_the_run(provider):
    _, session, name = session_of(lambda x, w: Keep.apply(x), provider)
    Keep.kept.clear()
    given = [torch.randn(3, 100) for _ in range(4)]
    for x in given:
        session.run(None, {name: x.numpy()})
    for kept, x in zip(Keep.kept, given, strict=True):
        torch.testing.assert_close(kept.cpu(), x * 2.0)


@pytest.mark.cuda
@needs_cuda
def test_functions_of_a_session_run_on_one_stream_of_the_runtimes():
    stock.try_cuda()
    _, session, name = session_of(
        lambda x, w: Streams.apply(torch.tanh(Streams.apply(x))), "CUDAExecutionProvider"
    )
    Streams.seen.clear()
    session.run(None, {name: torch.ones(3, 100).numpy()})
    first, second = Streams.seen
    assert first == second != torch.cuda.default_stream().cuda_stream
