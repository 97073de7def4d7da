"""The device and the stream of a session, and the feeds that it accepts."""

from __future__ import annotations

from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.device import emulate_streams
from torch2ort.errors import EngineError
from torch2ort.runtime import _ort_private as private
from torch2ort.runtime.cuda.sessions import DeviceFeeds, DeviceRun, device_of, on_stream
from torch2ort.runtime.ortvalues import to_tensors, to_value

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


@pytest.mark.parametrize(
    ("providers", "device"),
    [
        (None, "cpu"),
        ((CPU,), "cpu"),
        (("AzureExecutionProvider", CPU), "cpu"),
        ((CUDA, CPU), "cuda:0"),
        (((CUDA, (("device_id", "1"),)), CPU), "cuda:1"),
    ],
)
def test_providers_say_where_tensors_are(providers: Any, device: str) -> None:
    assert device_of(providers) == torch.device(device)


def test_a_session_is_told_its_stream_beside_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = emulate_streams(monkeypatch).own
    providers = (CUDA, (("device_id", "1"), ("use_tf32", "0"))), CPU
    settings = {"device_id": "1", "use_tf32": "0", "user_compute_stream": str(0x5EED)}
    assert on_stream(providers, stream) == [(CUDA, settings), CPU]
    assert on_stream(None, stream) == [CPU]


@pytest.mark.skipif(private.version() < (1, 20), reason="onnxruntime-training 1.19.2 has no such runs")
def test_a_run_names_its_devices_and_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    entries: list[tuple[str, str]] = []
    made = private.onnxruntime().RunOptions

    class Noted(made):  # type: ignore[misc, valid-type]
        def add_run_config_entry(self, key: str, value: str) -> None:
            entries.append((key, value))
            super().add_run_config_entry(key, value)

    monkeypatch.setattr(onnxruntime, "RunOptions", Noted)
    x, y = (onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [None]) for n in "xy")
    node = onnx.helper.make_node("Neg", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "graph", [x], [y])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=[CPU])
    run = DeviceRun(session, ["y"], torch.device("cpu"))
    (found,) = to_tensors(run(["x"], [to_value(torch.ones(3))]), ())
    assert torch.equal(found, -torch.ones(3))
    assert entries == [("disable_synchronize_execution_providers", "1")]


@pytest.mark.skipif(private.version() < (1, 20), reason="onnxruntime-training 1.19.2 has no such runs")
def test_the_place_of_outputs_is_cudas() -> None:
    place, of_cpu = private.device_place("cuda", 1), private.device_place("cpu", 0)
    ort = private.pybind().OrtDevice
    assert (place.device_type(), place.device_id()) == (ort.cuda(), 1)
    # CPU builds up to onnxruntime 1.24.4 have no vendor id.
    if hasattr(place, "vendor_id") and place.vendor_id():
        assert place.vendor_id() == 0x10DE
    assert of_cpu.device_type() == ort.cpu()


def test_a_feed_of_another_device_is_refused() -> None:
    with FakeTensorMode():
        elsewhere = torch.empty(2, device="cuda:1")
    with pytest.raises(EngineError) as caught:
        DeviceFeeds(torch.device("cuda", 0)).values([elsewhere])
    assert str(caught.value) == (
        "a tensor is on cuda:1, and the sessions of this graph were made for tensors on cuda:0. Move it "
        "there with .to('cuda:0')"
    )


@pytest.mark.parametrize(
    ("tensor", "goes"),
    [
        (torch.tensor(3.0), True),
        (torch.tensor(3.0, requires_grad=True), False),
        (torch.ones(1), False),
    ],
    ids=["a number", "a number with a gradient", "an array"],
)
def test_a_number_on_the_cpu_goes_to_the_device_alone(
    monkeypatch: pytest.MonkeyPatch, tensor: torch.Tensor, goes: bool
) -> None:
    moved: list[Any] = []

    def to(self: torch.Tensor, device: Any, **how: Any) -> torch.Tensor:
        moved.append((device, how))
        return self

    monkeypatch.setattr(torch.Tensor, "to", to)
    feeds, place = DeviceFeeds(torch.device("cuda", 0)), torch.device("cuda", 0)
    if goes:
        feeds.values([tensor])
        assert moved == [(place, {"non_blocking": True})]
        return
    with pytest.raises(EngineError, match="a tensor is on cpu, and the sessions of this graph"):
        feeds.values([tensor])
