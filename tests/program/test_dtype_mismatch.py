"""Tensors of every dtype in trained models: byte masks, counts, tables in half or double precision."""

from __future__ import annotations

import re

import pytest
import torch

import torch2ort
from tests.ops.indices import outcome
from tests.support.sweeps import sample_cases


class Masked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x, numbers):
        tripled = (numbers + numbers) * 3
        mask = (tripled >= 2) & (numbers != 5)
        result = torch.where(mask, x * self.weight, x) * tripled.float().clamp(-9, 9)
        return result, tripled, torch.maximum(numbers, tripled) // 2


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.bfloat16, torch.float64], ids=str
)
def test_operators_without_a_kernel_in_their_dtype_stand_beside_a_gradient(dtype):
    x, numbers = torch.randn(3, 4), torch.tensor([1, 2, 5, 100]).to(dtype)
    expected, found = Masked(), torch2ort.ORTModule(Masked())
    results = [model(x, numbers) for model in (expected, found)]
    for result in results:
        result[0].sum().backward()
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(found.weight.grad, expected.weight.grad)


CLAMPS = {
    "-1 for bytes": (torch.uint8, lambda x: x.clamp(-1, 100)),
    "-1 for bytes, lower alone": (torch.uint8, lambda x: x.clamp(min=-1)),
    "-1 for bytes, upper alone": (torch.uint8, lambda x: x.clamp(max=-1)),
    "-1 for bytes, hardtanh": (torch.uint8, torch.nn.functional.hardtanh),
    "above int8": (torch.int8, lambda x: x.clamp(-1, 200)),
    "below int8": (torch.int8, lambda x: torch.clamp_min(x, -200)),
    "both beside int16": (torch.int16, lambda x: x.clamp(-70000, 70000)),
    "no number left": (torch.int8, lambda x: torch.clamp_min(x, 200)),
}


class Body(torch.nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(x)


@pytest.mark.parametrize(("dtype", "body"), CLAMPS.values(), ids=CLAMPS)
def test_bounds_beside_an_integer_dtype_are_what_the_installed_torch_makes_of_them(dtype, body):
    x = torch.tensor([0, 1, 2, 5, 100, 127], dtype=dtype)
    try:
        expected = body(x.clone())
    except RuntimeError:
        with pytest.raises(RuntimeError, match=r"^([Cc]annot do hardtanh|Clamp m|aten\.clamp)"):
            torch2ort.export(Body(body), (x,))
        return
    torch.testing.assert_close(torch2ort.export(Body(body), (x,))(x), expected, rtol=0, atol=0)


NUMBERS = {
    "add": lambda x: x + 300,
    "mul": lambda x: 300 * x,
    "sub": lambda x: x - 300,
    "rsub": lambda x: -300 - x,
    "floor_divide": lambda x: x // 300,
    "remainder": lambda x: x % 300,
    "pow": lambda x: x**300,
    "eq": lambda x: x == 300,
    "lt": lambda x: x < 300,
    "and": lambda x: x & 300,
    "in place": lambda x: x.clone().add_(300),
    "where": lambda x: torch.where(x > 1, x, 300),
    "full_like": lambda x: torch.full_like(x, 300),
    "full": lambda x: x + torch.full((6,), 300, dtype=x.dtype),
    "fill_": lambda x: x.clone().fill_(-300),
    "masked_fill": lambda x: x.masked_fill(x > 1, 300),
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("body", sample_cases(NUMBERS.values(), 2), ids=NUMBERS)
def test_numbers_that_an_integer_dtype_does_not_hold_are_taken_as_in_eager(body, dtype):
    x = torch.tensor([0, 1, 2, 44, 100, 127], dtype=dtype)
    expected = outcome(body, x)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(torch2ort.export(Body(body), (x,))(x), expected, rtol=0, atol=0)
        return
    with pytest.raises(torch2ort.DtypeError) as caught:
        torch2ort.export(Body(body), (x,))
    assert re.fullmatch(
        rf"aten\.\S+ at \S+test_dtype_mismatch\.py:\d+, in forward: return self\.body\(x\): eager PyTorch "
        rf"refuses the number -?300 for {dtype} \({re.escape(expected[1])}\)\. Take one that the dtype holds",
        str(caught.value),
    )


def _takes_any_bound() -> bool:
    try:
        torch.ones(1, dtype=torch.int8).clamp(-1, 200)
    except RuntimeError:
        return False
    return True


@pytest.mark.skipif(_takes_any_bound(), reason="this torch takes a bound above the dtype for none")
def test_bounds_that_eager_refuses_and_tracing_takes_are_refused_with_their_line():
    with pytest.raises(torch2ort.DtypeError) as caught:
        torch2ort.export(Body(CLAMPS["above int8"][1]), (torch.ones(1, dtype=torch.int8),))
    assert re.fullmatch(
        r"aten\.clamp\.default at \S+test_dtype_mismatch\.py:\d+, in forward: return self\.body\(x\): eager "
        r"PyTorch refuses its bounds for torch\.int8 \(value cannot be converted to type int8_t without "
        r"overflow\)\. Take bounds that the dtype holds",
        str(caught.value),
    )
