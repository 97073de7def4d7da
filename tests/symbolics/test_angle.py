"""Angles of real numbers are floating-point numbers, those of integers too."""

from __future__ import annotations

import math

import pytest
import torch

import torch2ort


class Angle(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.angle()


DTYPES = (torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float64, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_angle_is_eagers(dtype: torch.dtype) -> None:
    numbers = [1, -2, 0, math.nan] if dtype.is_floating_point else [1, -2 if dtype.is_signed else 2, 0]
    x = torch.tensor(numbers).to(dtype)
    exported = torch2ort.export(Angle().eval(), x)
    torch.testing.assert_close(exported(x), torch.angle(x), equal_nan=True)
