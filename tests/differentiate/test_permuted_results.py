"""Results of kernels in a permuted memory layout are read in that layout, and not copied twice."""

from __future__ import annotations

import copy

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch2ort


class Attention(nn.Module):
    """Attention of two heads; ``also`` reads its result in PyTorch's order as well."""

    def __init__(self, *, also: bool = False) -> None:
        super().__init__()
        self.project, self.out, self.also = nn.Linear(8, 24), nn.Linear(8, 8), also

    def forward(self, x):
        shape = (*x.shape[:2], 2, 4)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.project(x).split(8, -1))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.out(heads.transpose(1, 2).reshape(x.shape))
        return (y, heads.amax(1)) if self.also else (y,)


def trained(model, x):
    """Outputs and gradients of one step."""
    x = x.clone().requires_grad_()
    outputs = model(x)
    sum(output.square().sum() for output in outputs).backward()
    return [*outputs, x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("also", [False, True], ids=["so alone", "in both orders"])
def test_what_attention_gives_is_eagers(dtype, also):
    model = Attention(also=also).to(dtype)
    x = torch.randn(3, 5, 8, dtype=dtype)
    expected = trained(copy.deepcopy(model), x)
    bounds = {} if dtype is torch.float32 else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(trained(torch2ort.ORTModule(model), x), expected, **bounds)


def test_attention_is_called_without_a_copy_in_another_order(tmp_path):
    model = torch2ort.ORTModule(Attention(), options=torch2ort.Options(save_onnx_dir=tmp_path))
    trained(model, torch.randn(3, 5, 8))
    for half in ("forward", "backward"):
        (file,) = tmp_path.glob(f"*_{half}.onnx")
        graph = onnx.load(file).graph
        made = {name for node in graph.node if node.op_type == "Transpose" for name in node.output}
        read = {name for node in graph.node if node.op_type == "Transpose" for name in node.input}
        calls = [node for node in graph.node if node.op_type == "PythonOp"]
        assert made.isdisjoint(name for node in calls for name in node.input)
        assert read.isdisjoint(name for node in calls for name in node.output)
