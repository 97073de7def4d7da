"""Dropout, so that its random numbers are PyTorch's.

It is noise times the input; in graphs that are exported one operator, which ONNX has, too.
"""

from __future__ import annotations

import torch

from torch2ort.program import internal_ops
from torch2ort.program.decomposition_table import EXPORTED, decomposes

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


@decomposes(aten.dropout.default)
def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """``input * noise``, with the noise that eager on CPU multiplies with."""
    if not train or p == 0:
        return input.clone()
    if p == 1:
        return input * torch.zeros_like(input)
    noise: torch.Tensor = internal_ops.dropout_noise(input, p)
    return input * noise


@decomposes(aten.native_dropout.default)
def native_dropout(input: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout and the mask of what it kept."""
    if train is False or p == 0:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    if p == 1:
        return input * torch.zeros_like(input), torch.zeros_like(input, dtype=torch.bool)
    noise = internal_ops.dropout_noise(input, p)
    return input * noise, noise != 0


@decomposes(aten.dropout.default, table=EXPORTED)
def whole_dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """One operator."""
    return whole_native_dropout(input, p, train)[0]


@decomposes(aten.native_dropout.default, table=EXPORTED)
def whole_native_dropout(
    input: torch.Tensor, p: float, train: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One operator, in single precision where the input is in half."""
    if train is False or p in (0, 1):
        return native_dropout(input, p, train)
    dropped, mask = internal_ops.dropout(_single(input), p, input.dtype)
    return dropped.to(input.dtype), mask


@decomposes(aten.bernoulli.p, table=EXPORTED)
def bernoulli(self: torch.Tensor, p: float) -> torch.Tensor:
    """In single precision where the result is in half: the numbers are the same."""
    if not self.dtype.is_floating_point:
        return NotImplemented  # type: ignore[no-any-return]
    drawn: torch.Tensor = internal_ops.bernoulli(_single(self), p)
    return drawn.to(self.dtype)


def _single(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor
