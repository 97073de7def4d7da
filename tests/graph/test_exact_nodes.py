"""A file says MaxPool, and a session of torch2ort's gives eager's NaN and infinities."""

from __future__ import annotations

import math
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import torch2ort
from torch2ort.errors import ModelLoadError
from torch2ort.graph.exact_nodes import EXACT_META


def special(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Windows with NaN, of minus infinity alone, and of plain numbers."""
    x = torch.arange(64, dtype=dtype).reshape(1, 1, 8, 8)
    x[0, 0, 0, 1] = math.nan
    x[0, 0, 2:4, 2:4] = -math.inf
    x[0, 0, 4, 4] = math.inf
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_file_has_the_pool_alone_and_its_sessions_are_exact(dtype: torch.dtype, tmp_path: Path) -> None:
    model, x = nn.MaxPool2d(2).eval(), special(dtype)
    exported = torch2ort.export(model, x)
    assert [node.op_type for node in exported.proto.graph.node] == ["MaxPool"]
    exported.save(tmp_path / "pool.onnx")
    loaded = torch2ort.load(tmp_path / "pool.onnx")
    results = [exported(x), loaded(x), torch.from_numpy(loaded.session().run(None, {"input": x.numpy()})[0])]
    for result in results:
        torch.testing.assert_close(result, model(x), rtol=0, atol=0, equal_nan=True)


def test_a_plain_session_pools_numbers_as_eager(tmp_path: Path) -> None:
    model, x = nn.MaxPool2d(3, 2, padding=1).eval(), torch.randn(1, 2, 8, 8)
    torch2ort.export(model, x).save(tmp_path / "pool.onnx")
    (result,) = onnxruntime.InferenceSession(str(tmp_path / "pool.onnx")).run(None, {"input": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(result), model(x), rtol=0, atol=0)


def test_a_module_keeps_nan_in_training_and_evaluation() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.MaxPool2d(2))
    for training in (True, False):
        module = torch2ort.ORTModule(model.train(training))
        torch.testing.assert_close(module(special()), model(special()), equal_nan=True)


def test_a_file_that_lost_a_mark_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "pool.onnx"
    torch2ort.export(nn.MaxPool2d(2).eval(), special()).save(file)
    changed = onnx.load(file)
    (pool,) = changed.graph.node
    marks = [prop for prop in pool.metadata_props if prop.key == EXACT_META]
    for mark in marks:
        pool.metadata_props.remove(mark)
    onnx.save(changed, file)
    with pytest.raises(ModelLoadError) as caught:
        torch2ort.load(file)
    assert str(caught.value) == (
        f'{file}: its nodes that say how PyTorch computes them are [], and were ["{pool.name}"] when it was '
        f"saved: it was changed by another tool. Export the model again, or open it in a plain "
        f"onnxruntime.InferenceSession, which computes them as ONNX Runtime does"
    )


GATED = {
    "silu": (nn.SiLU(), ["Sigmoid", "Mul"]),
    "glu": (nn.GLU(), ["Split", "Sigmoid", "Mul"]),
}


@pytest.mark.parametrize("name", GATED)
def test_a_gate_is_a_sigmoid_and_exact_where_that_is_small(name: str) -> None:
    model, operators = GATED[name]
    x = torch.tensor([[1.0, -1.0, 20.0, -20.0, -60.0, 3.0, -87.0, -20.0, 100.0, -100.0, 0.0, -0.0]])
    exported = torch2ort.export(model.eval(), x)
    assert [node.op_type for node in exported.proto.graph.node] == operators
    torch.testing.assert_close(exported(x), model(x), rtol=1e-5, atol=0)
