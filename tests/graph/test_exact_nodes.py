"""A file contains ONNX operators alone, and a torch2ort session gives eager PyTorch's results and errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import torch2ort
from torch2ort.errors import ModelLoadError
from torch2ort.graph.exact_nodes import NAN_META, REFINED_META


def special(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Windows with NaN, of minus infinity alone, and of finite numbers."""
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
    marks = [prop for prop in pool.metadata_props if prop.key == NAN_META]
    for mark in marks:
        pool.metadata_props.remove(mark)
    onnx.save(changed, file)
    with pytest.raises(ModelLoadError) as caught:
        torch2ort.load(file)
    assert str(caught.value) == (
        f'{file}: its nodes marked to run as in PyTorch are [], and were ["{pool.name}"] when it was '
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


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Rows with NaN, with infinities, and of finite numbers."""
    rows = [[1, math.nan, 3, math.nan], [math.inf, 2, -math.inf, 1], [-math.inf] * 4, [0, -0.0, 2, -1]]
    return torch.tensor(rows, dtype=dtype)


COUNTING = {
    "ReduceMax": lambda x: x.amax(1),
    "ReduceMin": lambda x: x.amin(1, keepdim=True),
    "ArgMax": lambda x: x.argmax(1),
    "ArgMin": lambda x: x.argmin(0, keepdim=True),
    "TopK": lambda x: x.topk(2)[0],
    "Erf": torch.erf,
    "Sign": torch.sign,
}


class Applied(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("operator", COUNTING)
def test_a_file_has_the_operator_alone_and_a_loaded_one_counts_nan(
    operator: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model, x = Applied(COUNTING[operator]).eval(), numbers(dtype)
    exported = torch2ort.export(model, torch.randn(4, 4).to(dtype))
    operators = {node.op_type for node in exported.proto.graph.node}
    assert operators - {"Cast", "Constant"} == {operator}
    exported.save(tmp_path / "model.onnx")
    loaded = torch2ort.load(tmp_path / "model.onnx")
    torch.testing.assert_close(loaded(x), model(x), equal_nan=True)


FORMULAS = {
    ("none", 18): ["Div", "Erf", "Add", "Mul", "Mul"],
    ("tanh", 18): ["Pow", "Mul", "Add", "Mul", "Tanh", "Mul", "Add", "Mul"],
    ("none", 20): ["Gelu"],
    ("tanh", 20): ["Gelu"],
}


@pytest.mark.parametrize(("approximate", "opset"), FORMULAS)
def test_gelu_is_in_operators_of_onnx_in_files_and_one_node_in_sessions(
    approximate: str, opset: int, tmp_path: Path
) -> None:
    model, x = nn.GELU(approximate).eval(), torch.randn(4, 16) * 3
    exported = torch2ort.export(model, x, opset=opset)
    nodes = [node.op_type for node in exported.proto.graph.node if node.op_type != "Constant"]
    assert nodes == FORMULAS[approximate, opset]
    assert {(entry.domain, entry.version) for entry in exported.proto.opset_import} == {("", opset)}
    exported.save(tmp_path / "gelu.onnx")
    (plain,) = onnxruntime.InferenceSession(tmp_path / "gelu.onnx").run(None, {"input": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(plain), model(x))
    loaded = torch2ort.load(tmp_path / "gelu.onnx")
    torch.testing.assert_close(loaded(x), model(x))
    (node,) = loaded._graph.proto.graph.node
    assert node.domain == "com.microsoft"


def test_a_gelu_that_another_tool_changed_is_computed_as_it_stands(tmp_path: Path) -> None:
    file, x = tmp_path / "gelu.onnx", torch.randn(4, 16)
    torch2ort.export(nn.GELU().eval(), x).save(file)
    changed = onnx.load(file)
    (one,) = [
        node.attribute[0].t
        for node in changed.graph.node
        if node.op_type == "Constant" and onnx.numpy_helper.to_array(node.attribute[0].t) == 1
    ]
    one.CopyFrom(onnx.numpy_helper.from_array(np.array(2, np.float32)))
    onnx.save(changed, file)
    torch.testing.assert_close(torch2ort.load(file)(x), x * 0.5 * (torch.erf(x / math.sqrt(2)) + 2))


class Looked(nn.Module):
    """Rows of a table, then elements of them, by indices that may be out of range."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)

    def forward(self, rows: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.table(rows)
        return found.gather(1, columns), found[rows, rows]


def looked() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Looked().eval(), (torch.tensor([2, 1, 0]), torch.tensor([[0], [2], [1]]))


BAD = {
    "a row": (torch.tensor([2, 5, 0]), torch.tensor([[0], [2], [1]])),
    "a row from the end": (torch.tensor([2, -1, 0]), torch.tensor([[0], [2], [1]])),
    "a column": (torch.tensor([2, 1, 0]), torch.tensor([[0], [3], [1]])),
    "an element": (torch.tensor([2, 3, 0]), torch.tensor([[0], [2], [1]])),
}


def test_a_file_looks_up_by_operators_of_onnx_alone(tmp_path: Path) -> None:
    model, sample = looked()
    exported = torch2ort.export(model, sample)
    assert {node.domain for node in exported.proto.graph.node} == {""}
    assert not exported.proto.functions
    assert [entry.domain for entry in exported.proto.opset_import] == [""]
    exported.save(tmp_path / "looked.onnx")
    plain = onnxruntime.InferenceSession(str(tmp_path / "looked.onnx"))
    feeds = {v.name: x.numpy() for v, x in zip(plain.get_inputs(), sample, strict=True)}
    for result, expected in zip(plain.run(None, feeds), model(*sample), strict=True):
        torch.testing.assert_close(torch.from_numpy(result), expected)


@pytest.mark.parametrize("bad", BAD)
def test_a_loaded_file_refuses_an_index_as_eager(bad: str, tmp_path: Path) -> None:
    model, sample = looked()
    torch2ort.export(model, sample).save(tmp_path / "looked.onnx")
    loaded = torch2ort.load(tmp_path / "looked.onnx")
    for result, expected in zip(loaded(*sample), model(*sample), strict=True):
        torch.testing.assert_close(result, expected)
    with pytest.raises((IndexError, RuntimeError)) as eager:
        model(*BAD[bad])
    with pytest.raises(type(eager.value)) as caught:
        loaded(*BAD[bad])
    assert str(caught.value) == str(eager.value)


def test_a_loaded_file_is_saved_as_it_was(tmp_path: Path) -> None:
    model, sample = looked()
    exported = torch2ort.export(model, sample)
    exported.save(tmp_path / "looked.onnx")
    assert torch2ort.load(tmp_path / "looked.onnx").proto.graph == exported.proto.graph


def test_a_file_whose_lookup_reads_another_index_is_refused(tmp_path: Path) -> None:
    model, sample = looked()
    file = tmp_path / "looked.onnx"
    torch2ort.export(model, sample).save(file)
    changed = onnx.load(file)
    lookup = next(node for node in changed.graph.node if node.op_type == "Gather")
    changed.graph.node.insert(0, onnx.helper.make_node("Abs", [lookup.input[1]], ["other"]))
    lookup = next(node for node in changed.graph.node if node.op_type == "Gather")
    lookup.input[1] = "other"
    onnx.save(changed, file)
    with pytest.raises(ModelLoadError) as caught:
        torch2ort.load(file)
    assert str(caught.value) == (
        f"{file}: its node '{lookup.name}' has other tensors than its metadata describe: it was "
        f"changed by another tool. Export the model again, or open it in a plain "
        f"onnxruntime.InferenceSession, which computes it as ONNX Runtime does"
    )


@pytest.mark.parametrize("text", ["none", "[[1]]", "[[-1, [0]]]"])
def test_a_mark_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    model, sample = looked()
    file = tmp_path / "looked.onnx"
    torch2ort.export(model, sample).save(file)
    changed = onnx.load(file)
    lookup = next(node for node in changed.graph.node if node.op_type == "Gather")
    for prop in lookup.metadata_props:
        if prop.key == REFINED_META:
            prop.value = text
    onnx.save(changed, file)
    with pytest.raises(ModelLoadError) as caught:
        torch2ort.load(file)
    assert f"the metadata '{REFINED_META}' of its node '{lookup.name}' is damaged (" in str(caught.value)
