"""Operators of later opsets in files, and the nodes that torch2ort sessions run in their place."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch2ort
from torch2ort.runtime.kernel_support import _highest_opset

OPSET = 24
pytestmark = pytest.mark.skipif(_highest_opset() < OPSET, reason="onnxruntime or onnx without opset 24")


class Calls(nn.Module):
    def __init__(self, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.call = call
        self.weight = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.call(self.weight, *tensors)


def root_mean_square(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def causal(weight: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    mask = torch.full((q.shape[-2], k.shape[-2]), -torch.inf).triu(1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + mask
    return scores.softmax(-1) @ v


HEADS = tuple(torch.randn(2, 4, 5, 8) for _ in range(3))
MODELS: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...], str]] = {
    "silu": (lambda weight, x: F.silu(x), (torch.randn(3, 8),), "Swish"),
    "a product with a sigmoid": (lambda weight, x: x.sigmoid() * x, (torch.randn(3, 8),), "Swish"),
    "rms_norm": (
        lambda weight, x: F.rms_norm(x, (8,), weight, 1e-6),
        (torch.randn(3, 8),),
        "RMSNormalization",
    ),
    "an RMS norm of operators": (root_mean_square, (torch.randn(2, 3, 8),), "RMSNormalization"),
    "attention": (lambda weight, q, k, v: F.scaled_dot_product_attention(q, k, v), HEADS, "Attention"),
    "attention with a mask": (
        lambda weight, q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=torch.eye(5)),
        HEADS,
        "Attention",
    ),
    "causal attention": (
        lambda weight, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
        HEADS,
        "Attention",
    ),
    "attention of operators": (causal, HEADS, "Attention"),
}


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node if node.op_type != "Constant"]


@pytest.mark.parametrize("name", MODELS)
def test_a_file_has_one_operator_and_a_session_what_eager_computes(name: str, tmp_path: Path) -> None:
    call, tensors, operator = MODELS[name]
    model = Calls(call).eval()
    expected = model(*tensors).detach()
    exported = torch2ort.export(model, tensors, opset=OPSET)
    assert operator in operators(exported.proto)
    assert {"Softmax", "Sigmoid", "ReduceMean", "Div"}.isdisjoint(operators(exported.proto))
    onnx.checker.check_model(exported.proto, full_check=True)
    session = onnxruntime.InferenceSession(exported.proto.SerializeToString())
    feeds = {value.name: x.numpy() for value, x in zip(session.get_inputs(), tensors, strict=True)}
    torch.testing.assert_close(torch.from_numpy(session.run(None, feeds)[0]), expected)

    exported.save(tmp_path / "model.onnx")
    loaded = torch2ort.load(tmp_path / "model.onnx")
    torch.testing.assert_close(loaded(*tensors), expected)
    torch.testing.assert_close(loaded(*tensors), exported(*tensors), rtol=0, atol=0)
    assert operators(loaded.proto) == operators(exported.proto)


@pytest.mark.parametrize("opset", [18, 22])
def test_an_earlier_opset_has_the_nodes(opset: int) -> None:
    exported = torch2ort.export(Calls(lambda weight, x: F.silu(x)).eval(), torch.randn(3, 8), opset=opset)
    assert operators(exported.proto) == ["Sigmoid", "Mul"]


def test_a_value_that_another_node_reads_keeps_its_nodes() -> None:
    def call(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        gate = x.sigmoid()
        return x * gate + gate

    exported = torch2ort.export(Calls(call).eval(), torch.randn(3, 8), opset=OPSET)
    assert operators(exported.proto) == ["Sigmoid", "Mul", "Add"]


def test_special_numbers_are_eagers_in_a_loaded_file(tmp_path: Path) -> None:
    x = torch.tensor([[-torch.inf, torch.inf, torch.nan, -100.0, -0.0, 3e38, -3e38, 1e-40]])
    exported = torch2ort.export(Calls(lambda weight, x: F.silu(x)).eval(), x, opset=OPSET)
    exported.save(tmp_path / "model.onnx")
    torch.testing.assert_close(torch2ort.load(tmp_path / "model.onnx")(x), F.silu(x), equal_nan=True)


def damaged(tmp_path: Path, change: Callable[[onnx.NodeProto], None]) -> Path:
    path = tmp_path / "model.onnx"
    torch2ort.export(Calls(lambda weight, x: F.silu(x + 1)).eval(), torch.randn(3, 8), opset=OPSET).save(path)
    model = onnx.load(path)
    # The first entry is the checksum, which a tool does not write.
    del model.metadata_props[0]
    change(next(node for node in model.graph.node if node.op_type == "Swish"))
    onnx.save(model, path)
    return path


def test_an_operator_that_another_tool_gave_another_input_is_refused(tmp_path: Path) -> None:
    def change(node: onnx.NodeProto) -> None:
        node.input[0] = "tensors_0"

    with pytest.raises(torch2ort.ModelLoadError, match="it was changed by another tool"):
        torch2ort.load(damaged(tmp_path, change))


def test_an_operator_that_lost_its_metadata_is_refused(tmp_path: Path) -> None:
    def change(node: onnx.NodeProto) -> None:
        del node.metadata_props[:]

    with pytest.raises(torch2ort.ModelLoadError, match="it was changed by another tool"):
        torch2ort.load(damaged(tmp_path, change))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"made": [], "parts": [], "values": []}', '{"made": [], "parts": [{}], "values": []}'],
)
def test_damaged_metadata_are_refused(text: str, tmp_path: Path) -> None:
    def change(node: onnx.NodeProto) -> None:
        next(p for p in node.metadata_props if p.key == "torch2ort.composed").value = text

    with pytest.raises(torch2ort.ModelLoadError, match=r"'torch2ort.composed' of its node '.*' is damaged"):
        torch2ort.load(damaged(tmp_path, change))


def test_a_node_that_no_operator_stands_for_is_refused(tmp_path: Path) -> None:
    def change(node: onnx.NodeProto) -> None:
        entry = next(p for p in node.metadata_props if p.key == "torch2ort.composed")
        entry.value = entry.value.replace('"Sigmoid"', '"If"')

    with pytest.raises(torch2ort.ModelLoadError, match="a node that no operator replaces"):
        torch2ort.load(damaged(tmp_path, change))
