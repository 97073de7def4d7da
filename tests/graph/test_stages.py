"""``Options.save_onnx_dir`` keeps every graph at every stage."""

from __future__ import annotations

import onnx
import torch

import torch2ort
from tests.support.functions import Square


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return Square.apply(self.layer(x))


def test_a_training_step_leaves_the_exported_the_gradient_and_the_optimized_graph(tmp_path):
    module = torch2ort.ORTModule(Model(), options=torch2ort.Options(save_onnx_dir=tmp_path / "graphs"))
    module(torch.randn(2, 4)).sum().backward()
    files = sorted((tmp_path / "graphs").iterdir())
    assert [file.stem.split("_", 1)[1] for file in files] == ["Model_exported", "gradient", "optimized"]
    kinds = [{node.op_type for node in onnx.load(file).graph.node} for file in files]
    assert "PythonOpGrad" not in kinds[0]
    assert "PythonOpGrad" in kinds[1]
    assert "PythonOpGrad" in kinds[2]


def test_an_export_leaves_its_graph(tmp_path):
    torch2ort.export(Model(), torch.randn(2, 4), options=torch2ort.Options(save_onnx_dir=tmp_path))
    (file,) = tmp_path.iterdir()
    assert file.stem.endswith("Model_exported")
