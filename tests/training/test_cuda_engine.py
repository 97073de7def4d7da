"""The engines for a GPU, over the CPU and streams that record their order, give eager PyTorch's results.

``pytest --device emulated`` runs any other test on these engines.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import torch2ort
from tests.support import device
from tests.support.comparison import assert_trains_like_eager
from tests.support.device import Streams
from tests.support.functions import Affine, Square
from torch2ort.errors import EngineError
from torch2ort.runtime.cuda import gpu_inference
from torch2ort.training import cuda_engine
from torch2ort.training.cuda_engine import DeviceHalf

RUN = [("sessions", "default"), ("sessions", "enter"), ("sessions", "exit"), ("default", "sessions")]
# The copies for the caller are made on its stream, before the memory of the originals is used again.
COPIED = [("sessions", "default")]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        hidden = Affine.apply(Square.apply(self.layer(x)), self.layer.bias)
        return self.dropout(torch.tanh(hidden)) * scale


class LeavesOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return device.emulate(monkeypatch)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The halves that ran on the device, in order."""
    found: list[str] = []
    run = DeviceHalf.run

    def noted(self: DeviceHalf, *given: Any) -> Any:
        found.append(self._name)
        return run(self, *given)

    monkeypatch.setattr(DeviceHalf, "run", noted)
    return found


def test_training_is_eagers(streams: Streams, runs: list[str]) -> None:
    assert_trains_like_eager(Model(), [(torch.randn(3, 4), torch.tensor(2.0)) for _ in range(3)], steps=4)
    assert runs.count("forward") == runs.count("backward") > 1


def test_a_step_is_in_order_with_the_callers_stream(streams: Streams) -> None:
    module, x = torch2ort.ORTModule(Model()), torch.randn(3, 4)
    module(x, torch.tensor(2.0)).sum().backward()
    streams.waits.clear()
    result = module(x, torch.tensor(2.0))
    assert streams.waits == RUN + COPIED
    streams.waits.clear()
    result.sum().backward()
    assert streams.waits == RUN + COPIED


def test_inference_is_in_order_with_the_callers_stream(streams: Streams) -> None:
    model = Model().eval()
    module, x = torch2ort.ORTModule(model), torch.randn(3, 4)
    with torch.no_grad():
        module(x, torch.tensor(2.0))
        streams.waits.clear()
        result = module(x, torch.tensor(2.0))
    assert streams.waits == RUN + COPIED
    torch.testing.assert_close(result, model(x, torch.tensor(2.0)).detach())


def test_a_backward_that_raises_leaves_the_stream(streams: Streams) -> None:
    class Raises(Square):
        @staticmethod
        def backward(ctx, grad):
            raise ValueError("mine")

    class Then(torch.nn.Module):
        def forward(self, x):
            return Raises.apply(x)

    result = torch2ort.ORTModule(Then())(torch.randn(3, requires_grad=True))
    streams.waits.clear()
    with pytest.raises(ValueError, match="mine"):
        result.sum().backward()
    assert streams.waits == RUN


def test_two_backwards_of_one_forward(streams: Streams) -> None:
    model, x = Model().eval(), torch.randn(3, 4)
    result = torch2ort.ORTModule(model)(x, torch.tensor(2.0))
    result.sum().backward(retain_graph=True)
    first = model.layer.weight.grad.clone()
    result.sum().backward()
    torch.testing.assert_close(model.layer.weight.grad, 2 * first)


def test_gradients_that_are_left_out_are_left_out(streams: Streams) -> None:
    class Then(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))

        def forward(self, x):
            return LeavesOut.apply(x * self.a) + x * self.b

    model = Then()
    torch2ort.ORTModule(model)(torch.ones(3)).sum().backward()
    assert model.a.grad is None
    assert torch.equal(model.b.grad, torch.ones(3))


def test_results_are_pytorchs_own_memory(streams: Streams) -> None:
    model = Model()
    result = torch2ort.ORTModule(model)(torch.randn(3, 4), torch.tensor(2.0))
    result.sum().backward()
    tensors = [result, *(p.grad for p in model.parameters())]
    # A value of onnxruntime cannot be resized.
    assert all(tensor.untyped_storage().resizable() for tensor in tensors)


def test_a_profile_runs_on_the_device_too(streams: Streams, runs: list[str]) -> None:
    module = torch2ort.ORTModule(Model())
    profile = module.profile(1)
    module(torch.randn(3, 4), torch.tensor(2.0)).sum().backward()
    profile.table()
    assert runs == ["forward", "backward"]


def test_what_forward_leaves_goes_with_its_outputs(streams: Streams) -> None:
    kept: list[weakref.ref[Any]] = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mine = torch.ones(3)
            if type(x) is torch.Tensor:
                kept.append(weakref.ref(ctx.mine))
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    class Then(torch.nn.Module):
        def forward(self, x):
            return Keeps.apply(x)

    result = torch2ort.ORTModule(Then())(torch.ones(3, requires_grad=True))
    assert kept[-1]() is not None
    del result
    gc.collect()
    assert kept[-1]() is None


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_a_session_that_went_without_its_provider_is_refused(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(cuda_engine, "on_stream", lambda providers, stream: both)
    with pytest.raises(EngineError, match=r"'CUDAExecutionProvider', which onnxruntime .* could not start"):
        torch2ort.ORTModule(Model())(torch.randn(3, 4), torch.tensor(2.0))


def test_the_device_is_that_of_the_options() -> None:
    # The emulation replaces only the choice of the engine.
    assert cuda_engine.device_of is gpu_inference.device_of
