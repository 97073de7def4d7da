"""Portable files that another tool or an attacker changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch.autograd import Function

import torch2ort
from tests.portable.portable_models import export

CALL = "torch2ort.call"


class Scale(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor


class Other(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        raise AssertionError("nobody gave this class")


def changed(tmp_path: Path, change: Callable[[onnx.ModelProto], None]) -> Path:
    """A file of two calls, changed as by a tool that rewrites it."""
    path = tmp_path / "model.onnx"
    export(lambda x: Scale.apply(Scale.apply(x, 2.0), 3.0), torch.randn(2, 3)).save(path)
    model = onnx.load(path)
    # The first entry is the checksum, which a tool does not write.
    del model.metadata_props[0]
    change(model)
    onnx.save(model, path)
    return path


def call(model: onnx.ModelProto, number: int = 0) -> onnx.StringStringEntryProto:
    return next(p for p in model.graph.node[number].metadata_props if p.key == CALL)


def test_a_file_that_lost_a_call_is_refused(tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        model.graph.node[1].metadata_props.remove(call(model, 1))

    path = changed(tmp_path, change)
    with pytest.raises(torch2ort.ModelLoadError) as caught:
        torch2ort.load(path)
    assert str(caught.value) == (
        f'{path}: its calls of Functions are ["Scale_0"], and were ["Scale_0", "Scale__2_1"] when it was '
        f"saved: it was changed by another tool. Export the model again, or open it in a plain "
        f"onnxruntime.InferenceSession, which runs the bodies that it has"
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"func_name": "a", "site": "{}"}'])
def test_damaged_metadata_of_a_call_are_refused(text: str, tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        call(model).value = text

    with pytest.raises(torch2ort.ModelLoadError):
        torch2ort.load(changed(tmp_path, change), functions=[Scale])


def test_a_call_with_another_number_of_tensors_is_refused(tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        data = json.loads(call(model).value)
        site = json.loads(data["site"])
        site["arguments"] = ["tensor", "tensor"]
        site["inputs"] = site["inputs"] * 2
        call(model).value = json.dumps({**data, "site": json.dumps(site)})

    with pytest.raises(torch2ort.ModelLoadError, match=r"'torch2ort.call' of its node 'Scale_0' is damaged"):
        torch2ort.load(changed(tmp_path, change), functions=[Scale])


def test_a_call_that_names_another_class_calls_only_what_is_given(tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        for number in range(2):
            call(model, number).value = call(model, number).value.replace("Scale", "Other")

    path = changed(tmp_path, change)
    x = torch.randn(2, 3)
    torch.testing.assert_close(torch2ort.load(path)(x), x * 6)
    with pytest.raises(torch2ort.FunctionNotFoundError):
        torch2ort.load(path, functions=[Scale])


def test_a_python_op_in_a_body_is_refused(tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        node = onnx.helper.make_node("PythonOp", ["x"], ["c", "y"], "inner", domain="com.microsoft")
        model.functions[0].node.append(node)
        model.functions[0].opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
        model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))

    with pytest.raises(
        torch2ort.ModelLoadError, match="its local function 'Scale' holds the PythonOp node 'inner'"
    ):
        torch2ort.load(changed(tmp_path, change))
