"""From which size on a tensor is worth a call of PyTorch's kernel."""

from __future__ import annotations

import math

import torch

from torch2ort.sizes.symbols import size_hint

# From this many elements on, a call of PyTorch's kernel costs less than ONNX Runtime's gradient kernels:
# measured, the latter take 2 to 10 times as long as PyTorch's, and a call costs about 10 microseconds.
LARGE = 16384


def is_large(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` had at least :data:`LARGE` elements in the sample."""
    return math.prod(size_hint(size) for size in tensor.shape) >= LARGE
