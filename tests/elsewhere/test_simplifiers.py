"""Simplifiers of other tools find little to remove from files, and `load` refuses files that they changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import onnxscript.optimizer
import pytest
import torch

import torch2ort
from tests.elsewhere.runtimes import MODELS


def onnxscript_optimizer(model: onnx.ModelProto) -> onnx.ModelProto:
    return ir.to_proto(onnxscript.optimizer.optimize(ir.from_proto(model)))


def slim(model: onnx.ModelProto) -> onnx.ModelProto:
    onnxslim = pytest.importorskip("onnxslim", reason="onnxslim has no wheel for this Python")
    return onnxslim.slim(model)


def simplifier(model: onnx.ModelProto) -> onnx.ModelProto:
    onnxsim = pytest.importorskip("onnxsim", reason="onnx-simplifier has no wheel for this Python")
    simplified, is_right = onnxsim.simplify(model)
    assert is_right
    return simplified


TOOLS: dict[str, Callable[[onnx.ModelProto], onnx.ModelProto]] = {
    "onnxscript": onnxscript_optimizer,
    "onnxslim": slim,
    "onnx-simplifier": simplifier,
}
FIRST = ("perceptron, with Functions", "Llama", "LSTM")
CHOSEN = [name if name in FIRST else pytest.param(name, marks=pytest.mark.long) for name in MODELS]


def exported(name: str) -> tuple[torch2ort.ExportedModel, torch.Tensor]:
    torch.manual_seed(1)
    model, x = MODELS[name]()
    return torch2ort.export(model.eval(), x, portable=True, cache_dir=False), x


def copy_of(model: onnx.ModelProto) -> onnx.ModelProto:
    made = onnx.ModelProto()
    made.CopyFrom(model)
    return made


def run(model: onnx.ModelProto, x: torch.Tensor) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("name", CHOSEN)
def test_a_simplified_file_computes_the_same(name: str, tool: str) -> None:
    export, x = exported(name)
    expected = run(export.proto, x)
    scale = max(float(np.abs(expected).max()), 1e-30)
    actual = run(TOOLS[tool](copy_of(export.proto)), x)
    np.testing.assert_allclose(actual / scale, expected / scale, rtol=1e-4, atol=1e-5)


def simplified(tool: str, tmp_path: Path) -> tuple[Path, torch2ort.ExportedModel, torch.Tensor]:
    export, x = exported("Llama")
    export.save(tmp_path / "model.onnx")
    onnx.save(TOOLS[tool](onnx.load(tmp_path / "model.onnx")), tmp_path / "simple.onnx")
    return tmp_path / "simple.onnx", export, x


def test_a_file_of_onnxscripts_optimizer_loads(tmp_path: Path) -> None:
    path, export, x = simplified("onnxscript", tmp_path)
    torch.testing.assert_close(torch2ort.load(path)(x), export(x))


@pytest.mark.parametrize("tool", ["onnxslim", "onnx-simplifier"])
def test_a_file_that_lost_its_marks_is_refused(tool: str, tmp_path: Path) -> None:
    path, *_ = simplified(tool, tmp_path)
    with pytest.raises(torch2ort.ModelLoadError, match="it was changed by another tool"):
        torch2ort.load(path)


@pytest.mark.long
def test_onnxscripts_optimizer_takes_two_nodes_of_a_hundred_at_most() -> None:
    counts = np.zeros(2, int)
    for name in MODELS:
        proto = exported(name)[0].proto
        for i, model in enumerate((proto, onnxscript_optimizer(copy_of(proto)))):
            parts = (model.graph, *model.functions)
            counts[i] += sum(node.op_type != "Constant" for part in parts for node in part.node)
    assert counts[1] >= 0.98 * counts[0]
