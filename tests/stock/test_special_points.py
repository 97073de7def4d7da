"""Exports give eager PyTorch's values at kinks, ties, zeros, infinities, NaN, and the smallest numbers."""

from __future__ import annotations

import warnings

import pytest
import torch

import torch2ort
from tests.ops import special_points as sp

# Eager PyTorch's own kernels disagree on the sign of infinity, at zeros, and on GELU at infinity.
_UNDEFINED = frozenset({"rsqrt", "pow -0.5", "gelu"})
GROUPS = {
    "one operand": (sp.UNARY, (sp.FINITE,)),
    "infinities": (sp.UNARY, (sp.ENDLESS,)),
    "two operands": (sp.BINARY, (sp.FINITE, sp.FINITE.flip(0))),
    "equal operands": (sp.BINARY, (sp.FINITE, sp.FINITE)),
    "rows": (sp.OF_ROWS, (sp.ROWS,)),
    "smallest": (sp.UNARY, (sp.SMALLEST,)),
    "pairs of ends": (sp.BINARY, sp.PAIRS),
    "odd rows": (sp.OF_ROWS, (sp.ODD_ROWS,)),
}
_files: dict[tuple[str, ...], torch2ort.ExportedModel] = {}


def exported(operators, inputs) -> torch2ort.ExportedModel:
    """One file for all points of the same operators."""
    names = tuple(operators)
    if names not in _files:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            _files[names] = torch2ort.export(sp.Points(operators).eval(), (inputs,))
    return _files[names]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("group", GROUPS)
def test_an_export_is_equal_to_eager_at_special_points(group):
    operators, points = GROUPS[group]
    inputs = {name: points for name in operators}
    found, expected = exported(operators, inputs)(inputs), sp.Points(operators).eval()(inputs)
    # ONNX Runtime's pools start at the smallest finite number, which is above minus infinity.
    pools = {name for name in operators if "max_pool" in name} if group == "odd rows" else set()
    for name in operators.keys() - _UNDEFINED - pools:
        torch.testing.assert_close(
            found[name],
            expected[name],
            rtol=1e-4,
            atol=1e-6,
            equal_nan=True,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_pool_keeps_what_is_no_number(dtype):
    x = torch.arange(32, dtype=dtype).reshape(1, 2, 4, 4)
    x[0, 1, 2, 2] = torch.nan
    model = torch.nn.MaxPool2d(2).eval()
    torch.testing.assert_close(torch2ort.export(model, x)(x), model(x), rtol=0, atol=0, equal_nan=True)


class Product(torch.nn.Module):
    def forward(self, x):
        return x @ x.transpose(0, 1), x.median(-1).values


def test_a_transposed_product_stands_beside_a_kernel_of_pytorch():
    x = torch.arange(12.0).reshape(3, 4)
    model = Product().eval()
    torch.testing.assert_close(torch2ort.export(model, x)(x), model(x))


@pytest.mark.parametrize("number", [-17.0, -20.0, -50.0, -88.0])
@pytest.mark.parametrize("kind", [torch.nn.Sigmoid, torch.nn.SiLU, torch.nn.GLU])
def test_a_probability_that_is_small_is_not_zero(kind, number):
    x = torch.full((16,), number)
    model = kind().eval()
    torch.testing.assert_close(torch2ort.export(model, x)(x), model(x), rtol=1e-5, atol=0)
