"""On CUDA a Function runs on onnxruntime's stream, with eager's results, once somebody has asked for it."""

from __future__ import annotations

import subprocess
import sys

import onnxruntime
import pytest
import torch

import torch2ort
from tests.functions import Square
from torch2ort.runtime.stock import try_cuda


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(Square.apply(x * 2.0)) + 1.0


def test_it_is_refused_until_asked_for():
    done = subprocess.run(
        [sys.executable, "-m", "tests.stock.fake_runtime"], capture_output=True, text=True, timeout=100
    )
    assert done.stdout == (
        "PythonOp lib.Gelu (node 'PythonOp_0'): Functions on the CUDAExecutionProvider were never run by "
        "torch2ort's tests; use the CPUExecutionProvider, or call torch2ort.runtime.stock.try_cuda() and "
        "compare with eager\n"
    ), done.stderr


@pytest.mark.cuda
@pytest.mark.skipif(
    "CUDAExecutionProvider" not in onnxruntime.get_available_providers(),
    reason="this onnxruntime has no CUDAExecutionProvider",
)
def test_results_are_eagers():
    try_cuda()
    exported = torch2ort.export(Model().eval(), torch.ones(1000))
    session = exported.session(providers=["CUDAExecutionProvider", "CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    for _ in range(5):
        x = torch.randn(1000)
        (y,) = session.run(None, {name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(y), Model()(x))
