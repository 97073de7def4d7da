"""Zeros without memory, which some of PyTorch's derivatives give, such as that of ``sgn``."""

from __future__ import annotations

import torch

from torch2ort.kernels import _torch_private as private


def with_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or zeros that a runtime can read."""
    return tensor.clone() if private.is_zero_tensor(tensor) else tensor
