"""Zeros without memory, which some of PyTorch's derivatives give, such as that of ``sgn``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch2ort._torch import dispatch as private


def with_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or zeros that a runtime can read."""
    return tensor.clone() if private.is_zero_tensor(tensor) else tensor


def all_with_memory(tensors: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
    """The tensors, or zeros that a runtime can read in the place of those without memory."""
    for tensor in tensors:  # nearly always there is none
        if tensor is not None and private.is_zero_tensor(tensor):
            return [None if t is None else with_memory(t) for t in tensors]
    return tensors
