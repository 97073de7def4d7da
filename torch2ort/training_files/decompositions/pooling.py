"""The gradients of pooling."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch2ort.training_files.decompositions.registry import derives

aten = torch.ops.aten


@derives(aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default)
def max_pool_backward(
    grad_output: torch.Tensor,
    self: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: torch.Tensor,
) -> torch.Tensor:
    """Add each gradient at the index of its window's maximum."""
    axes = len(kernel_size)
    cells = math.prod(self.shape[-axes:])
    planes = math.prod(self.shape[:-axes])
    windows = math.prod(grad_output.shape[-axes:])
    zeros = grad_output.new_zeros(planes, cells)
    places, given = indices.reshape(planes, windows), grad_output.reshape(planes, windows)
    return zeros.scatter_add(1, places, given).reshape(self.shape)


@derives(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def avg_pool_backward(
    grad_output: torch.Tensor,
    self: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> torch.Tensor:
    """Spread each gradient over its window in equal shares, by a transposed convolution with ones."""
    axes = len(kernel_size)
    if ceil_mode or divisor_override is not None:
        return NotImplemented  # type: ignore[no-any-return]
    stride = list(stride) or list(kernel_size)
    stride, padding = (list(one) if len(one) == axes else [one[0]] * axes for one in (stride, padding))
    sizes, outputs = self.shape[-axes:], grad_output.shape[-axes:]
    planes = math.prod(self.shape[:-axes])
    ones = grad_output.new_ones(1, 1, *kernel_size)
    none = [0] * axes
    if count_include_pad or not any(padding):
        shares = grad_output / math.prod(kernel_size)
    else:
        full = grad_output.new_ones(1, 1, *sizes)
        counts = aten.convolution(full, ones, None, stride, padding, [1] * axes, False, none, 1)
        shares = grad_output / counts.reshape(outputs)
    left = [
        size - ((out - 1) * s - 2 * p + k)
        for size, out, s, p, k in zip(sizes, outputs, stride, padding, kernel_size, strict=True)
    ]
    spread: torch.Tensor = aten.convolution(
        shares.reshape(planes, 1, *outputs), ones, None, stride, padding, [1] * axes, True, left, 1
    )
    return spread.reshape(self.shape)


@derives(aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default)
def adaptive_avg_pool_backward(grad_output: torch.Tensor, self: torch.Tensor) -> torch.Tensor:
    """Multiply along each axis with the matrix of shares, which is constant where the sizes are."""
    axes = 2 if grad_output.dim() == self.dim() and self.dim() <= 4 else 3
    result = grad_output
    for axis in range(self.dim() - axes, self.dim()):
        size, count = self.shape[axis], grad_output.shape[axis]
        if count == 1:
            result = (result / size).expand([size if i == axis else s for i, s in enumerate(result.shape)])
        elif isinstance(size, int) and isinstance(count, int):
            result = (result.transpose(axis, -1) @ _shares(size, count, grad_output)).transpose(axis, -1)
        else:
            return NotImplemented
    return result


def _shares(size: int, count: int, like: torch.Tensor) -> torch.Tensor:
    """Return each element's share of each window's gradient: (count, size)."""
    places = torch.arange(size, device=like.device)
    windows = torch.arange(count, device=like.device).unsqueeze(1)
    first = torch.div(windows * size, count, rounding_mode="trunc")
    end = torch.div((windows + 1) * size + count - 1, count, rounding_mode="trunc")
    inside = ((places >= first) & (places < end)).to(like.dtype)
    return inside / inside.sum(1, keepdim=True)
