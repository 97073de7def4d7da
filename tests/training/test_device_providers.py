"""Providers of an ORTModule follow the device of its tensors, or it is refused by name; tensors are fake."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnxruntime
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import torch2ort
from torch2ort import Options
from torch2ort.errors import OptionError, RuntimeNotFoundError, UnsupportedOperatorError
from torch2ort.runtime import stock
from torch2ort.training import device_providers
from torch2ort.training.device_providers import on_their_device

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
OUT = "or move the model and its inputs with .cpu()"
WHERE = "the tensors of Model are on cuda:0"


def on(device: str, *sizes: int, requires_grad: bool = False) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(sizes, device=device, requires_grad=requires_grad)


def cuda(number: int = 0, **settings: str) -> Any:
    return (CUDA, (("use_tf32", "0"), ("device_id", str(number)), *settings.items())), CPU


@pytest.fixture
def with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """An onnxruntime that claims to have CUDA, and to accept PyTorch's memory."""
    names = [CUDA, *onnxruntime.get_available_providers()]
    monkeypatch.setattr(device_providers, "shares_memory", lambda: True)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: names)


@pytest.fixture
def tried(with_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, after a call of try_cuda()."""
    monkeypatch.setattr(stock, "_tried", [True])


def chosen(*tensors: torch.Tensor, **options: Any) -> Sequence[Any] | None:
    return on_their_device(Options(**options), tensors, "Model").providers


@pytest.mark.usefixtures("tried")
@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ([on("cuda", 2), on("cuda", 3)], cuda()),
        ([on("cuda:1", 2)], cuda(1)),
        ([on("cuda", 2), on("cpu")], cuda()),
        ([on("cpu", 2), on("cpu")], None),
        ([], None),
    ],
    ids=["a GPU", "another one", "a number on the CPU beside them", "the CPU", "nothing"],
)
def test_providers_follow_the_tensors(tensors: list[torch.Tensor], expected: Any) -> None:
    assert chosen(*tensors) == expected


@pytest.mark.usefixtures("tried")
def test_settings_of_cudas_provider_are_kept() -> None:
    given = [(CUDA, {"arena_extend_strategy": "kSameAsRequested", "use_tf32": 1}), CPU]
    (_, settings), rest = chosen(on("cuda:1", 2), providers=given)  # type: ignore[misc]
    assert dict(settings) == {"device_id": "1", "use_tf32": "1", "arena_extend_strategy": "kSameAsRequested"}
    assert rest == CPU


@pytest.mark.usefixtures("tried")
@pytest.mark.parametrize(
    ("tensors", "listed"),
    [
        ([on("cuda:0", 2), on("cuda:1")], "cuda:0, cuda:1"),
        ([on("cuda", 2), on("cpu", 2)], "cuda:0, cpu"),
        ([on("cuda", 2), on("cpu", requires_grad=True)], "cuda:0, cpu"),
    ],
)
def test_several_devices_are_refused(tensors: list[torch.Tensor], listed: str) -> None:
    with pytest.raises(UnsupportedOperatorError) as caught:
        chosen(*tensors)
    assert str(caught.value) == (
        f"the tensors of Model and of its call are on {listed}, and a session takes those of one device. "
        f"Move all of them to one"
    )


def test_an_onnxruntime_without_cuda_is_refused_with_what_to_install() -> None:
    here = f"onnxruntime {onnxruntime.__version__} has {', '.join(onnxruntime.get_available_providers())}"
    with pytest.raises(RuntimeNotFoundError) as caught:
        chosen(on("cuda", 2))
    assert str(caught.value) == (
        f"{WHERE}, and {here} here. Install onnxruntime-gpu (pip install 'torch2ort[gpu]', in an environment "
        f"without another onnxruntime), {OUT}"
    )


@pytest.mark.usefixtures("with_cuda")
def test_a_gpu_that_nobody_asked_for_is_refused() -> None:
    with pytest.raises(UnsupportedOperatorError) as caught:
        chosen(on("cuda", 2))
    assert str(caught.value) == (
        f"{WHERE}, and an ORTModule has run there on an emulated device only, not on a GPU yet. Call "
        f"torch2ort.runtime.stock.try_cuda() and compare with eager, {OUT}"
    )


@pytest.mark.usefixtures("with_cuda")
def test_a_provider_that_nobody_asked_to_try_is_refused_when_a_module_is_made() -> None:
    with pytest.raises(OptionError) as caught:
        torch2ort.ORTModule(torch.nn.Linear(2, 2), options=Options(providers=[CUDA]))
    assert str(caught.value) == (
        "Option 'providers' names 'CUDAExecutionProvider'; an ORTModule has run there on an emulated device "
        "only, not on a GPU yet: call torch2ort.runtime.stock.try_cuda() and compare with eager. A model of "
        "torch2ort.export runs on any provider"
    )


@pytest.mark.usefixtures("tried")
def test_an_onnxruntime_that_takes_no_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_providers, "shares_memory", lambda: False)
    with pytest.raises(RuntimeNotFoundError) as caught:
        chosen(on("cuda", 2))
    assert str(caught.value) == (
        f"{WHERE}, and onnxruntime {onnxruntime.__version__} takes no memory of PyTorch's. Install "
        f"onnxruntime-gpu 1.22 or later, {OUT}"
    )


@pytest.mark.usefixtures("tried")
@pytest.mark.parametrize("name", ["fuse", "autotune"])
def test_options_for_the_cpu_are_refused(name: str) -> None:
    with pytest.raises(OptionError) as caught:
        chosen(on("cuda", 2), **{name: True})
    assert str(caught.value) == (
        f"Option {name!r} is True, and {WHERE}; it is for the CPU alone. Leave it out, {OUT}"
    )


@pytest.mark.usefixtures("tried")
@pytest.mark.parametrize(
    ("providers", "reason"),
    [
        (
            [CPU],
            f"names {CPU}, and {WHERE}. Name '{CUDA}' first, or leave providers out, which then follow the "
            f"tensors",
        ),
        (
            [CPU, CUDA],
            f"names {CPU}, {CUDA}, and {WHERE}. Name '{CUDA}' first, or leave providers out, which then "
            f"follow the tensors",
        ),
        (
            [(CUDA, {"device_id": 1})],
            f"gives '{CUDA}' the device_id 1, and {WHERE}. Leave it out, which then follows the tensors",
        ),
        (
            [(CUDA, {"user_compute_stream": 7})],
            f"gives '{CUDA}' a user_compute_stream; the sessions of an ORTModule have one stream of their "
            f"own, in order with PyTorch's. Leave it out",
        ),
    ],
)
def test_providers_that_do_not_fit_the_tensors_are_refused(providers: Any, reason: str) -> None:
    with pytest.raises(OptionError) as caught:
        chosen(on("cuda", 2), providers=providers)
    assert str(caught.value) == f"Option 'providers' {reason}"


@pytest.mark.usefixtures("tried")
def test_cuda_for_tensors_on_the_cpu_is_refused_in_the_first_call() -> None:
    module = torch2ort.ORTModule(torch.nn.Linear(2, 2), options=Options(providers=[CUDA, CPU]))
    with pytest.raises(OptionError) as caught:
        module(torch.ones(1, 2))
    assert str(caught.value) == (
        "Option 'providers' names 'CUDAExecutionProvider', and the tensors of Linear and of its call are on "
        "cpu. Move them with .cuda(), or leave providers out, which then follow the tensors"
    )
