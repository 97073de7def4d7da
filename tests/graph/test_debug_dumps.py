"""``Options.save_onnx_dir`` keeps every graph at every stage."""

from __future__ import annotations

import onnx
import pytest
import torch

import torch2ort
from tests.support.functions import Square


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return Square.apply(self.layer(x))


def test_an_export_leaves_its_graph(tmp_path):
    torch2ort.export(Model(), torch.randn(2, 4), options=torch2ort.Options(save_onnx_dir=tmp_path))
    (file,) = tmp_path.iterdir()
    assert file.stem.endswith("Model_exported")


def test_a_training_step_leaves_both_halves_as_they_are_built_and_run(tmp_path):
    module = torch2ort.ORTModule(Model(), options=torch2ort.Options(save_onnx_dir=tmp_path))
    module(torch.randn(2, 4)).sum().backward()
    names = [file.stem.split("_", 1)[1] for file in sorted(tmp_path.iterdir())]
    assert names == ["Model_exported", "forward", "forward_optimized", "backward", "backward_optimized"]


def test_the_halves_have_the_names_of_the_model(tmp_path):
    module = torch2ort.ORTModule(Model(), options=torch2ort.Options(save_onnx_dir=tmp_path))
    module(torch.randn(2, 4, requires_grad=True)).sum().backward()
    graphs = [onnx.load(next(tmp_path.glob(f"*_{half}.onnx"))).graph for half in ("forward", "backward")]
    assert {value.name for value in graphs[0].input} == {"x", "layer.weight", "layer.bias"}
    assert "grad_output" in {value.name for value in graphs[1].input}
    gradients = {"grad_x", "grad_layer.weight", "grad_layer.bias"}
    assert {value.name for value in graphs[1].output} == gradients


def test_inference_leaves_what_runs(tmp_path):
    module = torch2ort.ORTModule(Model(), options=torch2ort.Options(save_onnx_dir=tmp_path))
    with torch.no_grad():
        module(torch.randn(2, 4))
    names = [file.stem.split("_", 1)[1] for file in sorted(tmp_path.iterdir())]
    assert names == ["Model_exported", "inference_optimized"]


def test_a_graph_whose_differentiation_fails_is_there(tmp_path, monkeypatch):
    module = torch2ort.ORTModule(Model(), options=torch2ort.Options(save_onnx_dir=tmp_path))

    def failing(*args, **kwargs):
        raise torch2ort.UnsupportedOperatorError("no gradient")

    monkeypatch.setattr("torch2ort.training.plan_builder.trace_joint", failing)
    with pytest.raises(torch2ort.UnsupportedOperatorError, match=r"^no gradient$"):
        module(torch.randn(2, 4))
    (file,) = tmp_path.iterdir()
    assert [node.op_type for node in onnx.load(file).graph.node] == ["Gemm", "PythonOp"]
