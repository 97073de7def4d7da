"""Decompositions of tensors from numbers that a graph would otherwise store, or compute, in ``float32``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from torch2ort.program.decomposition_table import decomposes
from torch2ort.symbolics.double_literals import survives_float

aten = torch.ops.aten


def _loses(number: Any, dtype: torch.dtype | None) -> bool:
    """Return True if float32, which torch.onnx goes through, changes a number of a tensor of ``dtype``."""
    if type(number) is not float or (dtype or torch.get_default_dtype()) is not torch.float64:
        return False
    return not survives_float(number)


@decomposes(aten.full.default)
def full(size: Sequence[int], fill_value: float, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    """Expand one number."""
    if not _loses(fill_value, dtype):
        return NotImplemented
    return torch.scalar_tensor(fill_value, dtype=dtype, device=device).expand(size).clone()


@decomposes(aten.full_like.default)
def full_like(self: torch.Tensor, fill_value: float, *, dtype: Any = None, **_: Any) -> Any:
    """Call :func:`full`."""
    return full(self.shape, fill_value, dtype=dtype or self.dtype, device=self.device)


@decomposes(aten.new_full.default)
def new_full(
    self: torch.Tensor, size: Sequence[int], fill_value: float, *, dtype: Any = None, **_: Any
) -> Any:
    """Call :func:`full`."""
    return full(size, fill_value, dtype=dtype or self.dtype, device=self.device)


@decomposes(aten.fill.Scalar)
def fill(self: torch.Tensor, value: float) -> Any:
    """Call :func:`full`."""
    return full(self.shape, value, dtype=self.dtype, device=self.device)


@decomposes(aten.masked_fill.Scalar)
def masked_fill(self: torch.Tensor, mask: torch.Tensor, value: float) -> Any:
    """Choose between the tensor and one number with ``torch.where``."""
    if not _loses(value, self.dtype):
        return NotImplemented
    return torch.where(mask, torch.scalar_tensor(value, dtype=self.dtype, device=self.device), self)


@decomposes(aten.add.Tensor)
def add(self: torch.Tensor, other: torch.Tensor, *, alpha: float = 1) -> Any:
    """Multiply by ``alpha`` in an operator of its own, as the sum's kernels do in double."""
    loses = isinstance(other, torch.Tensor) and _loses(alpha, torch.result_type(self, other))
    return self + other * alpha if loses else NotImplemented


@decomposes(aten.sub.Tensor)
def sub(self: torch.Tensor, other: torch.Tensor, *, alpha: float = 1) -> Any:
    """Decompose like :func:`add`."""
    loses = isinstance(other, torch.Tensor) and _loses(alpha, torch.result_type(self, other))
    return self - other * alpha if loses else NotImplemented


@decomposes(aten.arange.default)
def arange(end: float, **settings: Any) -> Any:
    """Call :func:`arange_by_steps`."""
    return arange_by_steps(0, end, **settings)


@decomposes(aten.arange.start)
def arange_from(start: float, end: float, **settings: Any) -> Any:
    """Call :func:`arange_by_steps`."""
    return arange_by_steps(start, end, **settings)


@decomposes(aten.arange.start_step)
def arange_by_steps(
    start: float, end: float, step: float = 1, *, dtype: Any = None, device: Any = None, **_: Any
) -> Any:
    """Count fractions in double, as eager does: in float32, 0.01 fits into 1 a hundred and one times."""
    numbers = (start, end, step)
    dtype = dtype or torch.get_default_dtype()
    known = all(type(number) in (int, float) for number in numbers) and dtype.is_floating_point
    if not known or float not in map(type, numbers):
        return NotImplemented
    places = torch.arange(math.ceil((end - start) / step), dtype=torch.int64, device=device)
    return (places.to(torch.float64) * step + start).to(dtype)


@decomposes(aten.linspace.default)
def linspace(start: float, end: float, steps: int, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    """Count from both ends, as in eager."""
    dtype = dtype or torch.get_default_dtype()
    known = type(steps) is int and steps > 1 and all(type(number) in (int, float) for number in (start, end))
    if dtype is not torch.float64 or not known:
        return NotImplemented
    step = (end - start) / (steps - 1)
    places = torch.arange(steps, dtype=torch.int64, device=device)
    from_start = places.to(dtype) * step + start
    from_end = (steps - 1 - places).to(dtype) * -step + end
    return torch.where(places < steps // 2, from_start, from_end)
