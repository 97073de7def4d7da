"""Derivatives that ONNX Runtime computes in several operators, where PyTorch's kernel would take longer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from torch2ort.program.decomposition_table import Table
from torch2ort.sizes.symbols import size_hint

aten = torch.ops.aten

# From this many elements on, a call of PyTorch's kernel costs less than ONNX Runtime's gradient kernels:
# measured, the latter take 2 to 10 times as long as PyTorch's, and a call costs about 10 microseconds.
LARGE = 16384
# ONNX Runtime has kernels of the decompositions' operators for these dtypes.
_DTYPES = (torch.float32, torch.float64)


def _tanh(gradient: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    return gradient * (1 - output * output)


def _sigmoid(gradient: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    return gradient * (1 - output) * output


def _threshold(gradient: torch.Tensor, input: torch.Tensor, threshold: float) -> torch.Tensor:
    # A NaN is not below the threshold.
    return torch.where(input <= threshold, torch.zeros((), dtype=gradient.dtype), gradient)


def _if_small(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def decompose(gradient: torch.Tensor, of: torch.Tensor, *args: Any) -> Any:
        alike = gradient.dtype in _DTYPES and of.dtype == gradient.dtype and gradient.device.type == "cpu"
        return function(gradient, of, *args) if alike and not _is_large(gradient) else NotImplemented

    return decompose


_SMALL_DERIVATIVES: Table = {
    aten.tanh_backward.default: _if_small(_tanh),
    aten.sigmoid_backward.default: _if_small(_sigmoid),
    aten.threshold_backward.default: _if_small(_threshold),
}


def with_small_derivatives(table: Table) -> Table:
    """Return ``table`` with decompositions of derivatives, for tensors that were small in the sample."""
    return {**table, **_SMALL_DERIVATIVES}


def _is_large(tensor: torch.Tensor) -> bool:
    """Return True if ``tensor`` had at least :data:`LARGE` elements in the sample."""
    return math.prod(size_hint(size) for size in tensor.shape) >= LARGE
