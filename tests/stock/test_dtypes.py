"""Operators give eager PyTorch's results in every dtype, though ONNX Runtime has kernels for only some."""

from __future__ import annotations

import onnxruntime
import pytest
import torch

import torch2ort
from tests.ops import dtypes
from tests.ops.kernel_types import CODES, found
from torch2ort.runtime._ort_private import version
from torch2ort.symbolics.kernel_types import kernel_types

# Dtypes that differ in kernels alone, and the oldest runtime, which has other kernels.
ALIKE = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.float16}
LONG = set(dtypes.DTYPES) if version() < (1, 20) else ALIKE


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, marks=[pytest.mark.long] * (dtype in LONG), id=str(dtype).removeprefix("torch."))
        for dtype in dtypes.DTYPES
    ],
)
def test_operators_of_a_dtype_are_equal_to_eager(dtype):
    assert dtypes.outcome(dtypes.of_dtype(dtype), dtype, dtypes.exported) == {}


def test_the_table_names_no_kernel_that_the_runtime_lacks():
    lacking = {
        f"{operator}, {variable}": {code for code in CODES if CODES[code] in known[variable]} - {*codes}
        for operator, variables in found()
        if (known := kernel_types(operator)) is not None
        for variable, codes in variables.items()
    }
    assert {name: codes for name, codes in lacking.items() if codes} == {}


class Mask(torch.nn.Module):
    def forward(self, x):
        return (x >= 2) & (x != 5), x * x + 1


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.bfloat16])
def test_a_plain_session_runs_a_type_without_kernels(dtype, tmp_path):
    x = torch.tensor([1, 2, 5, 20]).to(dtype)
    path = tmp_path / "model.onnx"
    torch2ort.export(Mask().eval(), x).save(path)
    options = onnxruntime.SessionOptions()
    session = onnxruntime.InferenceSession(path, options)
    assert [node.type for node in session.get_outputs()] == [
        "tensor(bool)",
        f"tensor({str(dtype).removeprefix('torch.')})",
    ]
    assert torch2ort.load(path)(x)[1].tolist() == Mask()(x)[1].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_type_with_kernels_is_computed_as_it_is(dtype):
    exported = torch2ort.export(Mask().eval(), torch.ones(4, dtype=dtype))
    assert "Cast" not in {node.op_type for node in exported.proto.graph.node}


class Product(torch.nn.Module):
    def forward(self, x):
        return x.prod(), x.prod(0), x.prod(1, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize("base", [3, 7])
def test_a_product_of_integers_has_all_of_its_digits_and_wraps(dtype, base, tmp_path):
    x = torch.full((5, 20), base, dtype=dtype)
    path = tmp_path / "model.onnx"
    torch2ort.export(Product().eval(), x).save(path)
    torch.testing.assert_close(torch2ort.load(path)(x), Product()(x), rtol=0, atol=0)


class Sum(torch.nn.Module):
    def forward(self, x):
        return x.sum(), x.sum(0), x.sum(1, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_a_sum_of_integers_has_all_of_its_digits_and_wraps(dtype):
    ends = torch.iinfo(dtype)
    x = torch.tensor([[ends.max, ends.max - 3, 5], [ends.min, 1, ends.max // 2 + 1]], dtype=dtype)
    exported = torch2ort.export(Sum().eval(), x)
    torch.testing.assert_close(exported(x), Sum()(x), rtol=0, atol=0)


class Hidden(torch.nn.Module):
    """One operator that torch.onnx translates to several."""

    def forward(self, x):
        return torch.nn.functional.silu(x)


def test_bfloat16_is_rounded_between_operators_alone():
    exported = torch2ort.export(Hidden().eval(), torch.randn(4).bfloat16())
    operators, computed = [], {"x"}
    for node in exported.proto.graph.node:
        if computed.intersection(node.input):
            operators.append(node.op_type)
            computed.update(node.output)
    assert operators == ["Cast", "Sigmoid", "Mul", "Cast"]


class Cosine(torch.nn.Module):
    def forward(self, x):
        return torch.cos(x)


def test_a_file_calls_the_kernel_of_pytorch_where_no_type_will_do(tmp_path):
    x = torch.linspace(0, 1, 5, dtype=torch.float64)
    path = tmp_path / "model.onnx"
    torch2ort.export(Cosine().eval(), x).save(path)
    torch.testing.assert_close(torch2ort.load(path)(x), torch.cos(x), rtol=0, atol=0)


def test_a_silu_of_double_precision_stands_alone():
    x = torch.linspace(-3, 3, 8, dtype=torch.float64)
    model = torch.nn.SiLU().eval()
    torch.testing.assert_close(torch2ort.export(model, x)(x), model(x))
