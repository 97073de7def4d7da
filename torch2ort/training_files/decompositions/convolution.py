"""The gradients of a convolution, which are convolutions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch2ort.training_files.decompositions.registry import derives

aten = torch.ops.aten
_Gradients = tuple["torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None"]


@derives(aten.convolution_backward.default)
def convolution_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> _Gradients:
    """Compute the gradients of input, weight and bias; ``None`` for those that ``output_mask`` excludes."""
    rank = input.dim() - 2
    stride, padding, dilation = (_of_rank(one, rank) for one in (stride, padding, dilation))
    of_input = of_weight = of_bias = None
    if output_mask[0]:
        of_input = _of_input(grad_output, input, weight, stride, padding, dilation, transposed, groups)
    if output_mask[1]:
        # In a transposed convolution, input and output are exchanged.
        large, small = (grad_output, input) if transposed else (input, grad_output)
        of_weight = _of_weight(large, small, weight, stride, padding, dilation, groups)
    if output_mask[2]:
        of_bias = grad_output.sum([0, *range(2, input.dim())])
    return of_input, of_weight, of_bias


def _of_rank(numbers: Sequence[int], rank: int) -> list[int]:
    return list(numbers) if len(numbers) == rank else [numbers[0]] * rank


def _of_input(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    groups: int,
) -> torch.Tensor:
    none = [0] * len(stride)
    if transposed:
        return aten.convolution(  # type: ignore[no-any-return]
            grad_output, weight, None, stride, padding, dilation, False, none, groups
        )
    # The elements at the end that the stride does not reach.
    left = [
        size - ((out - 1) * s - 2 * p + d * (kernel - 1) + 1)
        for size, out, s, p, d, kernel in zip(
            input.shape[2:], grad_output.shape[2:], stride, padding, dilation, weight.shape[2:], strict=True
        )
    ]
    return aten.convolution(  # type: ignore[no-any-return]
        grad_output, weight, None, stride, padding, dilation, True, left, groups
    )


def _of_weight(
    large: torch.Tensor,
    small: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """Convolve the large tensor with the small one as kernel, which sums over the batch.

    The groups are concatenated along the channels, each with the whole batch.
    """
    batch, channels, *sizes = large.shape
    apart = large.reshape(batch, groups, channels // groups, *sizes)
    order = [2, 1, 0, *range(3, 3 + len(sizes))]
    data = apart.permute(order).reshape(channels // groups, groups * batch, *sizes)
    kernel = small.transpose(0, 1)
    none = [0] * len(stride)
    found = aten.convolution(data, kernel, None, dilation, padding, stride, False, none, groups)
    for axis, size in enumerate(weight.shape[2:], 2):
        found = found.narrow(axis, 0, size)
    return found.transpose(0, 1)  # type: ignore[no-any-return]
