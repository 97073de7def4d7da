"""ONNX operators compute derivatives of small tensors, PyTorch's kernels those of large ones."""

from __future__ import annotations

import copy
from pathlib import Path

import onnx
import pytest
import torch

import torch2ort
from torch2ort.symbolics.backward_decompositions import LARGE

FUNCTIONS = [torch.tanh, torch.sigmoid, torch.relu]
ENDS = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-30, 9.0, -9.0, 100.0, -100.0, 0.5]


class Model(torch.nn.Module):
    """A function of a weighted input."""

    def __init__(self, function, dtype=torch.float32) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones((), dtype=dtype))
        self.function = function

    def forward(self, x):
        return self.function(x * self.weight)


def gradients(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of the input and of the weight."""
    leaf = x.clone().requires_grad_()
    model.zero_grad()
    model(leaf).backward(torch.linspace(0.5, 2.0, x.numel(), dtype=x.dtype).view_as(x))
    return [leaf.grad, model.weight.grad]


def kernels(model: torch.nn.Module, x: torch.Tensor, folder: Path) -> list[str]:
    """Names of PyTorch's kernels that the model's backward half calls."""
    gradients(torch2ort.ORTModule(copy.deepcopy(model), options=torch2ort.Options(save_onnx_dir=folder)), x)
    (file,) = folder.glob("*_backward.onnx")
    called = [node for node in onnx.load(file).graph.node if node.op_type == "PythonOp"]
    return [a.s.decode() for node in called for a in node.attribute if a.name == "func_name"]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_size_decides(function, tmp_path):
    model = Model(function)
    assert kernels(model, torch.randn(4), tmp_path / "small") == []
    assert len(kernels(model, torch.randn(LARGE), tmp_path / "large")) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_are_eagers_at_the_ends_of_the_range(function, dtype):
    model, x = Model(function, dtype), torch.tensor(ENDS, dtype=dtype)
    actual, expected = (gradients(m, x)[0] for m in (torch2ort.ORTModule(copy.deepcopy(model)), model))
    torch.testing.assert_close(actual, expected, equal_nan=True)
