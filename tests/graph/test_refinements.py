"""A file contains ONNX operators where a torch2ort session runs PyTorch's kernels."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch2ort
from torch2ort.errors import ModelLoadError, Torch2OrtWarning
from torch2ort.graph.exact_nodes import REFINED_META


class Applied(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> object:
        return self.function(*tensors)


def image() -> torch.Tensor:
    return torch.arange(98.0).reshape(1, 2, 7, 7).sin()


# A function, common numbers, and numbers for which operators of ONNX are inexact.
NEAR = {
    "log1p": (torch.log1p, torch.rand(2, 3), torch.full((2, 3), 1e-9)),
    "logcumsumexp": (lambda x: x.logcumsumexp(1), torch.randn(3, 5), torch.tensor([[-1000.0, 0.0]] * 3)),
    "remainder": (lambda x: torch.remainder(x, 0.3), torch.randn(4), torch.tensor([3.0, 0.9, 0.6, 1.2])),
    "std": (lambda x: x.std(1), torch.randn(3, 4), torch.full((3, 4), 1e20)),
    "several results": (lambda x: torch.var_mean(x, 0), torch.randn(3, 4), torch.randn(3, 4) * 1e15),
    "in between": (lambda x: (torch.log1p(x) * 2).relu(), torch.rand(3), torch.full((3,), 1e-10)),
    "twice": (lambda x: (x.log1p(), x.log1p() + 1), torch.rand(3), torch.full((3,), 1e-10)),
    "one of the other": (lambda x: x.log1p().expm1(), torch.rand(3), torch.full((3,), 1e-10)),
}


def results(of: object) -> list[torch.Tensor]:
    return list(of) if isinstance(of, (tuple, list)) else [of]  # type: ignore[list-item]


@pytest.mark.parametrize("name", NEAR)
def test_a_plain_session_gives_eagers_results_for_common_numbers(name: str, tmp_path: Path) -> None:
    function, x, _ = NEAR[name]
    exported = torch2ort.export(Applied(function).eval(), x)
    exported.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    for result, expected in zip(found, results(function(x)), strict=True):
        torch.testing.assert_close(torch.from_numpy(result), expected)


@pytest.mark.parametrize("name", NEAR)
def test_sessions_of_torch2ort_run_the_kernel(name: str, tmp_path: Path) -> None:
    function, x, special = NEAR[name]
    exported = torch2ort.export(Applied(function).eval(), x if x.shape == special.shape else special)
    exported.save(tmp_path / "model.onnx")
    loaded = torch2ort.load(tmp_path / "model.onnx")
    session = loaded.session()
    run = [torch.from_numpy(r) for r in session.run(None, {session.get_inputs()[0].name: special.numpy()})]
    for found in (results(exported(special)), results(loaded(special)), run):
        for result, expected in zip(found, results(function(special)), strict=True):
            torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    assert loaded.proto.graph == exported.proto.graph


POOLS = {
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True),
    "max_pool2d, padded": lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2, 2, ceil_mode=True),
    "avg_pool2d, padded": lambda x: F.avg_pool2d(x, 3, 3, 1, ceil_mode=True),
    "avg_pool2d, padding left out": lambda x: F.avg_pool2d(
        x, 3, 2, 1, ceil_mode=True, count_include_pad=False
    ),
    "avg_pool1d, one image": lambda x: F.avg_pool1d(x[0, 0], 2, 2, ceil_mode=True),
}


@pytest.mark.parametrize("name", POOLS)
def test_a_pool_with_ceil_mode_is_one_of_onnx(name: str, tmp_path: Path) -> None:
    x, model = image(), Applied(POOLS[name]).eval()
    torch2ort.export(model, x).save(tmp_path / "pool.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "pool.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(x))


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("settings", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}])
def test_a_plain_recurrent_net_is_one_of_onnx(activation: str, settings: dict[str, object]) -> None:
    model, x = nn.RNN(3, 4, nonlinearity=activation, **settings).eval(), torch.randn(5, 2, 3)
    exported = torch2ort.export(model, x)
    assert "RNN" in {node.op_type for node in exported.proto.graph.node}
    assert {node.domain for node in exported.proto.graph.node} == {""}
    x[2, 0, 1] = torch.nan
    for result, expected in zip(exported(x), model(x), strict=True):
        torch.testing.assert_close(result, expected, equal_nan=True)


def test_a_weight_beside_a_kernel_is_one_initializer(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Applied(torch.expm1), nn.Linear(3, 3)).eval()
    x = torch.randn(2, 3)
    exported = torch2ort.export(model, x)
    names = sorted(t.name for t in exported.proto.graph.initializer if "." in t.name)
    assert names == ["0.bias", "0.weight", "2.bias", "2.weight"]
    torch.testing.assert_close(exported(x), model(x))


class Factored(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.cholesky(x)


def test_an_operator_that_onnx_lacks_is_told_with_its_line() -> None:
    with pytest.warns(Torch2OrtWarning) as caught:
        torch2ort.export(Factored().eval(), torch.eye(3))
    line = f"tests/graph/test_refinements.py:{Factored.forward.__code__.co_firstlineno + 1}"
    assert [str(warning.message) for warning in caught] == [
        f"ONNX has no operators for torch.ops.aten.linalg_cholesky ({line}): the graph calls PyTorch's "
        f"kernels, which a plain onnxruntime.InferenceSession finds only in torch2ort's library. Run the "
        f"file with torch2ort.load, or register a translation with torch2ort.register_symbolic"
    ]


def changed_mark(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the kernel call in a file's only mark."""
    model = onnx.load(file)
    (mark,) = [p for node in model.graph.node for p in node.metadata_props if p.key == REFINED_META]
    record = json.loads(mark.value)
    change(record[0][1][0])
    mark.value = json.dumps(record)
    onnx.save(model, file)


def test_metadata_that_would_call_a_forbidden_kernel_is_refused(tmp_path: Path) -> None:
    def call_another(kernel: dict[str, Any]) -> None:
        for attribute in kernel["attribute"]:
            text = base64.b64decode(attribute.get("s", ""))
            attribute["s"] = base64.b64encode(text.replace(b"log1p", b"from_file")).decode()

    file = tmp_path / "model.onnx"
    torch2ort.export(Applied(torch.log1p).eval(), torch.rand(3)).save(file)
    changed_mark(file, call_another)
    with pytest.raises(ModelLoadError):
        torch2ort.load(file)


def test_metadata_that_goes_in_a_circle_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    torch2ort.export(Applied(torch.log1p).eval(), torch.rand(3)).save(file)
    model = onnx.load(file)
    (mark,) = [p for node in model.graph.node for p in node.metadata_props if p.key == REFINED_META]
    record = json.loads(mark.value)
    (*_, exact) = record[0][1]
    other = {**exact, "output": ["other"], "input": [exact["output"][0], exact["input"][1]]}
    exact["input"][0] = "other"
    record[0][1][-1:] = [other, exact]
    mark.value = json.dumps(record)
    onnx.save(model, file)
    with pytest.raises(ModelLoadError) as caught:
        torch2ort.load(file)
    assert "has other tensors than its metadata describe" in str(caught.value)


def test_metadata_of_a_users_function_is_refused(tmp_path: Path) -> None:
    def call_function(kernel: dict[str, Any]) -> None:
        kernel["domain"], kernel["opType"] = "com.microsoft", "PythonOp"

    file = tmp_path / "model.onnx"
    torch2ort.export(Applied(torch.log1p).eval(), torch.rand(3)).save(file)
    changed_mark(file, call_function)
    with pytest.raises(ModelLoadError) as caught:
        torch2ort.load(file)
    assert f"the metadata '{REFINED_META}' of its node" in str(caught.value)
