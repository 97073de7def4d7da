"""Tensors of every dtype beside gradients: masks of bytes, counts, tables in half or double precision."""

from __future__ import annotations

import pytest
import torch

import torch2ort


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
