"""Zeros without memory, which some of PyTorch's derivatives return, such as that of ``sgn``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch2ort._torch import dispatch as private


def with_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or zeros with memory if it has none."""
    return tensor.clone() if private.is_zero_tensor(tensor) else tensor


def all_with_memory(tensors: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
    """Return the tensors, with zeros in memory in the place of those without memory."""
    for tensor in tensors:  # usually, there is none
        if tensor is not None and private.is_zero_tensor(tensor):
            return [None if t is None else with_memory(t) for t in tensors]
    return tensors
