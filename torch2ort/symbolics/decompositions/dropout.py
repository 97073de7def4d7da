"""Decompositions of dropout that draw PyTorch's random numbers.

Dropout is noise times the input; in exported graphs it is one operator, which ONNX has, too.
"""

from __future__ import annotations

import torch

from torch2ort.program import internal_ops
from torch2ort.program.decomposition_table import EXPORTED, decomposes

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


@decomposes(aten.dropout.default)
def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Return ``input * noise``, with the noise that eager PyTorch on CPU multiplies by."""
    if not train or p == 0:
        return input.clone()
    if p == 1:
        return input * torch.zeros_like(input)
    noise: torch.Tensor = internal_ops.dropout_noise(input, p)
    return input * noise


@decomposes(aten.native_dropout.default)
def native_dropout(input: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of dropout and the mask of the elements that it kept."""
    if train is False or p == 0:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    if p == 1:
        return input * torch.zeros_like(input), torch.zeros_like(input, dtype=torch.bool)
    noise = internal_ops.dropout_noise(input, p)
    return input * noise, noise != 0


@decomposes(aten.dropout.default, table=EXPORTED)
def whole_dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Keep dropout as one operator."""
    return whole_native_dropout(input, p, train)[0]


@decomposes(aten.native_dropout.default, table=EXPORTED)
def whole_native_dropout(
    input: torch.Tensor, p: float, train: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep dropout as one operator, in single precision where the input is in half."""
    if train is False or p in (0, 1):
        return native_dropout(input, p, train)
    dropped, mask = internal_ops.dropout(_single(input), p, input.dtype)
    return dropped.to(input.dtype), mask


@decomposes(aten.bernoulli.p, table=EXPORTED)
def bernoulli(self: torch.Tensor, p: float) -> torch.Tensor:
    """Draw in single precision where the result is in half precision: the numbers are the same."""
    if not self.dtype.is_floating_point:
        return NotImplemented  # type: ignore[no-any-return]
    drawn: torch.Tensor = internal_ops.bernoulli(_single(self), p)
    return drawn.to(self.dtype)


def _single(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor
