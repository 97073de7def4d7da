"""The gradients of a nearest-neighbour resize."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch2ort.training_files.decompositions.registry import derives

aten = torch.ops.aten


@derives(
    aten.upsample_nearest1d_backward.default,
    aten.upsample_nearest2d_backward.default,
    aten.upsample_nearest3d_backward.default,
)
def upsample_nearest_backward(
    grad_output: torch.Tensor, output_size: Sequence[int], input_size: Sequence[int], *scales: float | None
) -> torch.Tensor:
    """Sum the gradients of each element's copies, where all elements have the same number of copies."""
    shape: list[int] = list(input_size[:2])
    axes = []
    for output, size in zip(output_size, input_size[2:], strict=True):
        if not isinstance(output, int) or not isinstance(size, int) or output % size:
            return NotImplemented  # type: ignore[no-any-return]
        axes.append(len(shape) + 1)
        shape += [size, output // size]
    return grad_output.reshape(shape).sum(axes)
