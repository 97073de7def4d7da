"""Portable files: a call of a Function is a node of its name, with its body in the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn
from torch.autograd import Function

import torch2ort
from tests.portable.portable_models import Calls, export, in_a_plain_session
from tests.support.functions import Constants


class Swish(Function):
    """Counts its runs in Python."""

    runs: ClassVar[list[float]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, beta: float) -> torch.Tensor:
        if type(x) is torch.Tensor:
            Swish.runs.append(beta)
        return x * torch.sigmoid(beta * x)


class Plain(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, beta: float) -> torch.Tensor:
        return x * torch.sigmoid(beta * x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


def calls(exported: torch2ort.ExportedModel) -> list[onnx.NodeProto]:
    return [node for node in exported.proto.graph.node if node.domain]


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def test_a_call_is_a_node_of_the_functions_name() -> None:
    exported = export(lambda x: Plain.apply(x, 0.1), torch.randn(2, 3))
    (node,) = calls(exported)
    assert (node.domain, node.op_type) == (Plain.__module__, "Plain")
    assert attributes(node) == {"beta": pytest.approx(0.1)}
    assert [(f.domain, f.name, [*f.attribute]) for f in exported.proto.functions] == [
        (Plain.__module__, "Plain", ["beta"])
    ]
    onnx.checker.check_model(exported.proto, full_check=True)


def test_a_plain_session_runs_the_body_for_every_size() -> None:
    exported = export(lambda x: Plain.apply(x, 0.1), torch.randn(2, 3), dynamic_shapes={"x": {0: "batch"}})
    x = torch.randn(7, 3)
    torch.testing.assert_close(in_a_plain_session(exported, x)[0], Plain.apply(x, 0.1))


def test_the_reference_evaluator_runs_the_body() -> None:
    x = torch.randn(2, 3)
    exported = export(lambda x: Plain.apply(Plain.apply(x, 0.1), 2.0), x)
    (result,) = ReferenceEvaluator(exported.proto).run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(result), Plain.apply(Plain.apply(x, 0.1), 2.0))


def test_a_call_of_the_export_runs_the_body_and_has_no_python_ops() -> None:
    x = torch.randn(2, 3)
    exported = export(lambda x: Plain.apply(x, 0.1), x)
    assert exported.python_ops == ()
    torch.testing.assert_close(exported(x), Plain.apply(x, 0.1))


def test_calls_of_one_body_share_it() -> None:
    exported = export(lambda x: Plain.apply(Plain.apply(x, 0.1), 0.1), torch.randn(2, 3))
    assert [node.op_type for node in calls(exported)] == ["Plain", "Plain"]
    assert len(exported.proto.functions) == 1


def test_calls_of_other_sizes_share_a_body_that_does_not_depend_on_them() -> None:
    exported = export(
        lambda x: (Plain.apply(x, 0.1), Plain.apply(x[:1, :2], 0.1), Plain.apply(x.T, 0.1)), torch.randn(2, 3)
    )
    assert [node.op_type for node in calls(exported)] == ["Plain"] * 3


DIFFERENT: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "argument": (lambda x: (Plain.apply(x, 0.1), Plain.apply(x, 0.2)), ["Plain", "Plain__2"]),
    "dtype": (lambda x: (Plain.apply(x, 0.1), Plain.apply(x.double(), 0.1)), ["Plain", "Plain__2"]),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_calls_of_other_bodies_are_told_apart(name: str) -> None:
    call, names = DIFFERENT[name]
    x = torch.randn(2, 3)
    exported = export(call, x)
    assert [node.op_type for node in calls(exported)] == names
    torch.testing.assert_close(tuple(in_a_plain_session(exported, x)), call(x))


class Mean(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.mean(tuple(range(x.dim())), keepdim=True)


def test_calls_of_other_ranks_are_told_apart() -> None:
    x = torch.randn(2, 3)
    exported = export(lambda x: (Mean.apply(x), Mean.apply(x[0])), x)
    assert [node.op_type for node in calls(exported)] == ["Mean", "Mean__2"]
    torch.testing.assert_close(in_a_plain_session(exported, x)[1], Mean.apply(x[0]))


def test_the_arguments_of_each_kind_are_attributes() -> None:
    exported = export(lambda x: Constants.apply(x, *Constants.EXPECTED), torch.randn(2, 3))
    (node,) = calls(exported)
    assert attributes(node) == {
        "constants_0": 1,
        "constants_1": 3,
        "constants_2": pytest.approx(0.1),
        "constants_3": [1, 2],
        "constants_4": pytest.approx([0.1, 0.2]),
        "constants_5": [1, 0],
        "constants_6": b"mode",
        "constants_8": b"[1, 'a']",
        "constants_9": b"{'k': 1.5}",
        "constants_10": b"float32",
    }


class Three(Function):
    """Returns a constant among two tensors, and writes to an argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        ctx.mark_dirty(y)
        y.add_(x)
        return x * 2, "text", y


def test_a_function_that_writes_and_returns_several_values_has_a_body() -> None:
    def call(x: torch.Tensor) -> Any:
        y = x.exp()
        doubled, text, summed = Three.apply(x, y)
        assert text == "text"
        return doubled, summed, y

    x = torch.randn(2, 3)
    exported = export(call, x)
    torch.testing.assert_close(tuple(in_a_plain_session(exported, x)), call(x))


class Product(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ x.T


def test_a_function_under_autocast_computes_in_the_lower_type() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return Product.apply(x)

    x = torch.randn(4, 3)
    exported = export(call, x)
    assert [node.op_type for node in calls(exported)] == ["Product"]
    assert exported(x).dtype == torch.bfloat16
    torch.testing.assert_close(exported(x), call(x))


class Indexed(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x[index].amax(0)


def test_a_session_of_torch2ort_refuses_a_bad_index_of_a_body(tmp_path: Path) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return Indexed.apply(x, index)

    x, index = torch.randn(5, 3), torch.tensor([0, 4, 2])
    torch2ort.export(Model().eval(), (x, index), portable=True).save(tmp_path / "model.onnx")
    loaded = torch2ort.load(tmp_path / "model.onnx")
    torch.testing.assert_close(loaded(x, index), Indexed.apply(x, index))
    with pytest.raises(IndexError):
        loaded(x, index + 1)


def test_nan_counts_in_a_body_as_in_pytorch(tmp_path: Path) -> None:
    x = torch.tensor([[1.0, torch.nan], [0.0, 2.0]])
    exported = export(lambda x: Indexed.apply(x, torch.tensor([0, 1])), x)
    torch.testing.assert_close(exported(x), Indexed.apply(x, torch.tensor([0, 1])), equal_nan=True)


# --- weights


class Quantize(Function):
    """Reads a value of its weight."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, bits: int) -> torch.Tensor:
        scale = weight.abs().max().item() / (2 ** (bits - 1) - 1)
        return torch.round(weight / scale) * scale


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, Quantize.apply(self.layer.weight, 4), self.layer.bias)


def test_a_function_of_weights_alone_is_computed() -> None:
    model, x = Quantized().eval(), torch.randn(2, 3)
    exported = torch2ort.export(model, x, portable=True)
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in exported.proto.graph.initializer}
    assert weights.keys() == {"layer.weight.folded", "layer.bias"}
    torch.testing.assert_close(
        torch.from_numpy(weights["layer.weight.folded"].copy()),
        Quantize.apply(model.layer.weight.detach(), 4),
    )
    assert not exported.proto.functions
    torch.testing.assert_close(in_a_plain_session(exported, x)[0], model(x).detach())


def test_other_weights_out_of_the_cache_are_computed(tmp_path: Path) -> None:
    x = torch.randn(2, 3)
    for hit in (False, True):
        model = Quantized().eval()
        exported = torch2ort.export(model, x, portable=True, cache_dir=tmp_path)
        assert exported.cache.hit == hit
        torch.testing.assert_close(in_a_plain_session(exported, x)[0], model(x).detach())


def test_a_portable_file_and_another_one_are_two_entries_of_the_cache(tmp_path: Path) -> None:
    model, x = Calls(lambda x: Plain.apply(x, 0.1)).eval(), torch.randn(2, 3)
    torch2ort.export(model, x, cache_dir=tmp_path)
    exported = torch2ort.export(model, x, portable=True, cache_dir=tmp_path)
    assert not exported.cache.hit
    assert torch2ort.export(model, x, portable=True, cache_dir=tmp_path).cache.hit


# --- exporters


def test_a_registered_exporter_goes_first() -> None:
    torch2ort.register_exporter(Plain)(lambda g, x, beta: g.op("Sigmoid", x))
    x = torch.randn(2, 3)
    exported = export(lambda x: Plain.apply(x, 0.1), x)
    assert [node.op_type for node in exported.proto.graph.node] == ["Sigmoid"]


def test_an_exporter_that_declines_leaves_a_body() -> None:
    torch2ort.register_exporter(Plain)(lambda g, x, beta: None)
    exported = export(lambda x: Plain.apply(x, 0.1), torch.randn(2, 3))
    assert [node.op_type for node in calls(exported)] == ["Plain"]


# --- loading


def saved(tmp_path: Path, call: Callable[..., Any], x: torch.Tensor) -> Path:
    path = tmp_path / "model.onnx"
    export(call, x).save(path)
    return path


def test_a_loaded_file_runs_without_its_functions(tmp_path: Path) -> None:
    x = torch.randn(2, 3)
    loaded = torch2ort.load(saved(tmp_path, lambda x: Plain.apply(x, 0.1), x))
    assert loaded.python_ops == ()
    torch.testing.assert_close(loaded(x), Plain.apply(x, 0.1))


def test_a_class_that_is_given_runs_once_a_call_with_the_exact_arguments(tmp_path: Path) -> None:
    x = torch.randn(2, 3)
    path = saved(tmp_path, lambda x: Swish.apply(Swish.apply(x, 0.1), 0.3), x)
    Swish.runs.clear()
    loaded = torch2ort.load(path, functions=[Swish])
    assert not Swish.runs
    loaded(x)
    assert Swish.runs == [0.1, 0.3]
    assert [site.arguments for site in loaded.python_ops] == [{1: 0.1}, {1: 0.3}]


def test_a_class_that_is_registered_does_not_take_the_place_of_a_body(tmp_path: Path) -> None:
    x = torch.randn(2, 3)
    path = saved(tmp_path, lambda x: Swish.apply(x, 0.1), x)
    torch2ort.register_function(Swish)
    Swish.runs.clear()
    torch.testing.assert_close(torch2ort.load(path)(x), x * torch.sigmoid(0.1 * x))
    assert not Swish.runs


def test_a_class_that_the_file_does_not_call_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, lambda x: Plain.apply(x, 0.1), torch.randn(2, 3))
    with pytest.raises(torch2ort.FunctionNotFoundError) as caught:
        torch2ort.load(path, functions=[Plain, Mean])
    assert str(caught.value) == (
        f"the model is portable and does not call {__name__}.Mean. It calls {__name__}.Plain; leave out the "
        f"classes that it does not call"
    )


def test_a_loaded_file_is_saved_as_it_was(tmp_path: Path) -> None:
    x = torch.randn(2, 3)
    path = saved(tmp_path, lambda x: Plain.apply(x, 0.1), x)
    torch2ort.load(path).save(tmp_path / "again.onnx")
    first, second = (onnx.load(tmp_path / name) for name in ("model.onnx", "again.onnx"))
    assert [*first.graph.node] == [*second.graph.node]
    assert [*first.functions] == [*second.functions]
