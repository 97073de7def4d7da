"""Dropout as noise times the input, so that its random numbers are PyTorch's."""

from __future__ import annotations

import torch

from torch2ort.symbolics import operators
from torch2ort.symbolics.decompositions.registry import decomposes

aten = torch.ops.aten


@decomposes(aten.dropout.default)
def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """``input * noise``, with the noise that eager on CPU multiplies with."""
    if not train or p == 0:
        return input.clone()
    if p == 1:
        return input * torch.zeros_like(input)
    noise: torch.Tensor = operators.dropout_noise(input, p)
    return input * noise


@decomposes(aten.native_dropout.default)
def native_dropout(input: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout and the mask of what it kept."""
    if train is False or p == 0:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    if p == 1:
        return input * torch.zeros_like(input), torch.zeros_like(input, dtype=torch.bool)
    noise = operators.dropout_noise(input, p)
    return input * noise, noise != 0
