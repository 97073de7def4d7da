"""Training on CUDA tensors equals eager PyTorch's. The emulated device shows that the tests are right."""

from __future__ import annotations

from collections.abc import Callable

import onnxruntime
import pytest
import torch
import torch.nn.functional as F

import torch2ort
from tests.support import device
from tests.support.comparison import assert_trains_like_eager
from tests.support.functions import Affine, Square
from torch2ort.runtime import stock

needs_cuda = pytest.mark.skipif(
    "CUDAExecutionProvider" not in onnxruntime.get_available_providers(),
    reason="this onnxruntime has no CUDAExecutionProvider",
)
# Functions of CUDA's runtime by which the host waits for the device.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=[pytest.mark.cuda, needs_cuda])])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device of the tensors."""
    if request.param == "emulated":
        device.emulate(monkeypatch)
        return torch.device("cpu")
    stock.try_cuda()
    # By default cuDNN's convolutions round factors to 10 bits, and onnxruntime's here do not.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    return torch.device("cuda", 0)


class Functions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Affine.apply(torch.tanh(Square.apply(self.layer(x))), self.scale)


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 8)
        self.projection = torch.nn.Linear(8, 24)
        self.norm = torch.nn.LayerNorm(8)
        self.dropout = torch.nn.Dropout(0.2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + torch.arange(tokens.shape[-1], device=tokens.device).unsqueeze(-1)
        query, key, value = self.projection(self.norm(x)).chunk(3, -1)
        return self.dropout(F.scaled_dot_product_attention(query, key, value)) + x


class Images(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(F.gelu(self.norm(self.convolution(x))), 2).flatten(1)


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[], torch.Tensor]]] = {
    "Functions": (Functions, lambda: torch.randn(3, 8)),
    "attention": (Attention, lambda: torch.randint(11, (2, 5))),
    "images": (Images, lambda: torch.randn(2, 3, 8, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_training_is_eagers(place: torch.device, name: str) -> None:
    make, draw = MODELS[name]
    batches = [(draw().to(place),) for _ in range(3)]
    assert_trains_like_eager(make().to(place), batches, steps=4)


def test_results_and_gradients_are_on_the_device(place: torch.device) -> None:
    model, x = Functions().to(place), torch.randn(3, 8, device=place, requires_grad=True)
    result = torch2ort.ORTModule(model)(x)
    result.sum().backward()
    tensors = [result, x.grad, *(p.grad for p in model.parameters())]
    assert {tensor.device for tensor in tensors} == {torch.zeros(0, device=place).device}


def test_without_gradients_results_are_eagers(place: torch.device) -> None:
    for make, draw in MODELS.values():
        model, x = make().to(place).eval(), draw().to(place)
        with torch.no_grad():
            torch.testing.assert_close(torch2ort.ORTModule(model)(x), model(x), rtol=1e-4, atol=1e-5)


def test_under_autocast_training_is_eagers(place: torch.device) -> None:
    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.float().square().mean()

    model = Functions().to(place)
    module, x = torch2ort.ORTModule(model), torch.randn(3, 8, device=place)
    grads = []
    for each in (model, module):
        with torch.autocast(place.type, torch.bfloat16):
            output = each(x)
        loss(output).backward()
        grads.append((output, *(p.grad.clone() for p in model.parameters())))
        model.zero_grad()
    for expected, actual in zip(*grads, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_graph_depends_on_cudas_autocast() -> None:
    module, x = torch2ort.ORTModule(torch.nn.Linear(3, 2)), torch.ones(2, 3)
    module(x)
    without = module.exported
    # The state inside of torch.autocast("cuda"), which a PyTorch without CUDA does not enable.
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        module(x)
        assert module.exported is not without
    finally:
        torch.set_autocast_enabled("cuda", before)
    module(x)
    assert module.exported is without


@pytest.mark.cuda
@needs_cuda
def test_calls_from_several_streams_are_eagers() -> None:
    stock.try_cuda()
    model = Functions().cuda()
    module, streams = torch2ort.ORTModule(model), [torch.cuda.Stream() for _ in range(3)]
    for step in range(30):
        with torch.cuda.stream(streams[step % 3]):
            # Long work first, which a run that does not wait would overtake.
            big = torch.randn(2048, 2048, device="cuda")
            x = (big @ big)[:3, :8].clone().div_(2048)
            expected, actual = model(x), module(x)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        torch.cuda.synchronize()


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("name", MODELS)
def test_the_host_does_not_wait_in_a_step(name: str) -> None:
    stock.try_cuda()
    make, draw = MODELS[name]
    module, x = torch2ort.ORTModule(make().cuda()), draw().cuda()
    for _ in range(3):
        module(x).square().sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
            module(x).square().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # onnxruntime's streams, too.
    called = [event.key for event in profile.key_averages()]
    assert [name for name in called if name in WAITS] == []
