"""The providers of a compiled graph follow the devices of its tensors; without a GPU, tensors are fake."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch2ort.dynamo.backend import compile_graph
from torch2ort.dynamo.execution_providers import providers_of
from torch2ort.errors import UnsupportedOperatorError

OUT = "Move the model and its inputs with .cpu(), or exclude that part with torch.compiler.disable"
ASKED = ("AzureExecutionProvider", "CPUExecutionProvider")


def on(device: str, *sizes: int) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(sizes, device=device)


def cuda(number: int):
    return ("CUDAExecutionProvider", (("device_id", str(number)),)), "CPUExecutionProvider"


@pytest.mark.parametrize(
    ("inputs", "outputs", "expected"),
    [
        pytest.param([on("cuda", 2), 3], [on("cpu", 2)], cuda(0), id="those of the inputs"),
        pytest.param([on("cuda:1", 2), on("cuda:1")], [], cuda(1), id="with the device's number"),
        pytest.param([on("cuda", 2), on("cpu")], [], cuda(0), id="a number on the CPU goes anywhere"),
        pytest.param([on("cpu", 2)], [on("cuda", 2)], ASKED, id="the CPU's are those asked for"),
        pytest.param([on("cpu")], [], ASKED, id="a number alone"),
        pytest.param([3], [on("cuda:1", 2), None], cuda(1), id="those of the outputs"),
        pytest.param([3], [None, 4], ASKED, id="the default"),
    ],
)
def test_providers_follow_devices(inputs, outputs, expected) -> None:
    assert providers_of(inputs, outputs, ASKED) == expected


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (
            [on("cuda:0", 2), on("cpu", 2), on("cuda:0", 3)],
            "are on cuda:0, cpu, and a session takes those of one device",
        ),
        ([on("cuda:0", 2), on("cuda:1")], "are on cuda:0, cuda:1, and a session takes those of one device"),
        ([on("meta", 2)], "are on meta, which no execution provider is known for"),
    ],
)
def test_several_devices_and_unknown_ones_are_refused(inputs, words) -> None:
    with pytest.raises(UnsupportedOperatorError) as caught:
        providers_of(inputs, [], None)
    assert str(caught.value) == f"the tensors of the compiled code {words}. {OUT}"


def test_a_gpu_is_refused_before_anything_is_compiled() -> None:
    graph_module = torch.fx.symbolic_trace(torch.nn.ReLU())
    with pytest.raises(UnsupportedOperatorError) as caught:
        compile_graph(graph_module, [on("cuda", 2)], options=None, mode=None)
    assert str(caught.value) == (
        "the tensors of the compiled code are on a device of the CUDAExecutionProvider, and torch.compile "
        "runs on CPUExecutionProvider and AzureExecutionProvider alone so far, as the values that go from "
        f"forward to backward, and to Functions, are in the CPU's memory. {OUT}"
    )
