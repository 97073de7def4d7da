"""On CUDA a step's Functions run on onnxruntime's stream in both directions, without access from the host.

The library runs on an emulated device (tests.stock.fake_runtime): an access to its memory outside of
PyTorch's operators ends the process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from torch2ort.runtime import stock

ENTER, COPY = "enter stream 0x5eed of device 0", "copy_(non_blocking=True)"
WHERE = "PythonOpGrad mine (node 'PythonOpGrad')"


@pytest.fixture(scope="module")
def emulated() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.stock.emulated_cuda_steps"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_gradients_are_eagers_though_the_runtime_writes_over_what_forward_was_given(emulated):
    for step in (*emulated["steps"], *emulated["chain"]):
        assert not step["error"]
        assert step["outputs"]
        assert step["gradients"]


def test_backward_runs_on_the_runtimes_stream(emulated):
    assert emulated["steps"][1]["backward"] == [ENTER, "backward", COPY, COPY, "exit"]


def test_what_forward_keeps_is_copied_on_the_stream(emulated):
    assert emulated["steps"][1]["forward"] == [ENTER, "clone", "clone", "forward", COPY, "exit"]


def test_a_first_backward_works_on_a_copy_made_on_the_stream(emulated):
    assert emulated["steps"][0]["backward"] == [ENTER, "clone", "backward", COPY, COPY, "exit"]


def test_a_chain_enters_the_stream_once_each_way(emulated):
    first, second = emulated["chain"]
    assert first["forward"].count(ENTER) == first["backward"].count(ENTER) == 1
    assert second["backward"] == [ENTER, "backward", "backward", COPY, COPY, "exit"]


def test_zeros_for_a_gradient_that_backward_leaves_out_are_made_on_the_device(emulated):
    found = emulated["left_out"]
    assert found["backward"] == [ENTER, "clone", "backward", "zero_", COPY, COPY, "exit"]
    assert found["gradients"]
    assert found["undefined"] == [1]


def test_zeros_for_a_gradient_that_does_not_arrive_are_made_on_the_device(emulated):
    found = emulated["missing"]
    assert found["backward"] == [ENTER, "zero_", "clone", "backward", COPY, "exit"]
    assert found["gradients"]


def test_a_backward_that_raises_leaves_the_stream_and_its_exception_arrives(emulated):
    assert emulated["failure"] == {
        "backward": [ENTER, "clone", "exit"],
        "error": f"{WHERE}: ValueError: mine",
        "same": True,
    }


def test_a_gradient_in_the_hosts_memory_is_refused_as_in_eager(emulated):
    assert emulated["of_the_host"] == (
        f"{WHERE}: RuntimeError: Function GivesTheHostsBackward returned an invalid gradient at index 0 - "
        f"expected device cuda:0 but got cpu"
    )


def test_gradients_that_backward_keeps_are_not_overwritten(emulated):
    assert emulated["keeping"] == [True, True, True]


def test_a_backward_that_begins_to_keep_gradients_is_refused(emulated):
    assert emulated["late"] == [
        "",
        f"{WHERE}: EngineError: __main__.BeginsToKeep began to keep memory of ONNX "
        f"Runtime after its first call, and it could not be given memory of its own: save a clone() of the "
        f"tensor instead",
    ]


def test_contexts_that_are_kept_serve_a_second_backward(emulated):
    found = emulated["retained"]
    assert found["backward"] == [ENTER, "backward", COPY, COPY, "exit"]
    assert found["gradients"]


def test_an_operator_of_pytorch_is_called_in_python_on_the_stream(emulated):
    # In C++ the CPU's kernel would run.
    assert emulated["kernel"]["direct"]
    assert emulated["kernel"]["calls"] == [[[ENTER, "forward", COPY, "exit"], True]] * 3


def test_a_donated_value_of_the_device_is_refused(emulated):
    assert emulated["donated"] == (
        "Donated: value 0 of forward is on cuda:0, and a node on the CPU cannot hand it over"
    )


def test_a_stream_without_an_address_is_the_default_one(monkeypatch):
    # torch.cuda.ExternalStream(0) is another stream, out of torch's pool.
    stock._external_stream.cache_clear()
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: ("default", device))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda address, device: (address, device))
    assert stock._external_stream(0, 1) == ("default", torch.device("cuda", 1))
    assert stock._external_stream(7, 1) == (7, torch.device("cuda", 1))
    stock._external_stream.cache_clear()
