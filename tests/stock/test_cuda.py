"""On CUDA a Function runs on onnxruntime's stream, with eager's results."""

from __future__ import annotations

import onnxruntime
import pytest
import torch

import torch2ort
from tests.functions import Square
from torch2ort.runtime.stock import try_cuda

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        "CUDAExecutionProvider" not in onnxruntime.get_available_providers(),
        reason="this onnxruntime has no CUDAExecutionProvider",
    ),
]


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(Square.apply(x * 2.0)) + 1.0


def session():
    exported = torch2ort.export(Model().eval(), torch.ones(1000))
    return exported.session(providers=["CUDAExecutionProvider", "CPUExecutionProvider"])


def test_results_are_eagers():
    try_cuda()
    made = session()
    name = made.get_inputs()[0].name
    for _ in range(5):
        x = torch.randn(1000)
        (y,) = made.run(None, {name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(y), Model()(x))
