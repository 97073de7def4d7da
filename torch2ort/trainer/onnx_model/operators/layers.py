"""Operators of ONNX that are layers and losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from torch2ort.trainer.onnx_model.operators.host_scalars import Value, refuse_unless, tensor


def softmax(x: Value, *, axis: int = -1) -> Value:
    """Softmax."""
    return torch.softmax(x, axis)


def log_softmax(x: Value, *, axis: int = -1) -> Value:
    """LogSoftmax."""
    return torch.log_softmax(x, axis)


class Dropout(torch.nn.Module):
    """A Dropout node with ``training_mode``.

    Args:
        ratio: fraction of the elements that become 0.
    """

    def __init__(self, ratio: float) -> None:
        super().__init__()
        self.ratio = ratio

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop elements, while the module trains."""
        return F.dropout(x, self.ratio, self.training)


def _padding(pads: Sequence[int] | None, auto_pad: str, rank: int, what: str) -> tuple[list[int], list[int]]:
    """Return the amounts before and after each axis."""
    refuse_unless(auto_pad in ("NOTSET", "VALID"), f"{what} with auto_pad {auto_pad}")
    given = [0] * (2 * rank) if pads is None or auto_pad == "VALID" else list(pads)
    return given[:rank], given[rank:]


def _padded(x: torch.Tensor, before: list[int], after: list[int], value: float) -> torch.Tensor:
    flat = [one for pair in zip(reversed(before), reversed(after), strict=True) for one in pair]
    return F.pad(x, flat, value=value)


def convolution(
    x: Value, weight: Value, bias: Value = None, *, auto_pad: str = "NOTSET", dilations: Any = None,
    group: int = 1, kernel_shape: Any = None, pads: Any = None, strides: Any = None,
) -> Value:  # fmt: skip
    """Conv in one, two or three dimensions."""
    rank = x.dim() - 2
    before, after = _padding(pads, auto_pad, rank, "Conv")
    ones = [1] * rank
    if before != after:
        x, before = _padded(x, before, after, 0.0), [0] * rank
    function = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    return function(x, weight, bias, strides or ones, before, dilations or ones, group)


def transposed_convolution(
    x: Value, weight: Value, bias: Value = None, *, auto_pad: str = "NOTSET", dilations: Any = None,
    group: int = 1, kernel_shape: Any = None, output_padding: Any = None, output_shape: Any = None,
    pads: Any = None, strides: Any = None,
) -> Value:  # fmt: skip
    """ConvTranspose in one, two or three dimensions."""
    rank = x.dim() - 2
    before, after = _padding(pads, auto_pad, rank, "ConvTranspose")
    refuse_unless(output_shape is None, "ConvTranspose with output_shape")
    refuse_unless(before == after, "ConvTranspose with different pads in front and behind")
    ones = [1] * rank
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
    extra = output_padding or [0] * rank
    return function(x, weight, bias, strides or ones, before, extra, group, dilations or ones)


def max_pool(
    x: Value, *, kernel_shape: Any, auto_pad: str = "NOTSET", ceil_mode: int = 0, dilations: Any = None,
    pads: Any = None, storage_order: int = 0, strides: Any = None, count: int,
) -> Value:  # fmt: skip
    """MaxPool in one, two or three dimensions."""
    refuse_unless(count == 1, "MaxPool whose indices are read")
    rank = x.dim() - 2
    before, after = _padding(pads, auto_pad, rank, "MaxPool")
    ones = [1] * rank
    if before != after or any(2 * one > k for one, k in zip(before, kernel_shape, strict=True)):
        x, before = _padded(x, before, after, float("-inf")), [0] * rank
    function = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[rank - 1]
    return function(x, kernel_shape, strides or ones, before, dilations or ones, bool(ceil_mode))


def average_pool(
    x: Value, *, kernel_shape: Any, auto_pad: str = "NOTSET", ceil_mode: int = 0, count_include_pad: int = 0,
    dilations: Any = None, pads: Any = None, strides: Any = None,
) -> Value:  # fmt: skip
    """AveragePool in one, two or three dimensions."""
    rank = x.dim() - 2
    before, after = _padding(pads, auto_pad, rank, "AveragePool")
    refuse_unless(before == after, "AveragePool with different pads in front and behind")
    refuse_unless(all(one == 1 for one in dilations or [1]), "AveragePool with dilations")
    refuse_unless(not ceil_mode, "AveragePool with ceil_mode")
    small = all(2 * one <= k for one, k in zip(before, kernel_shape, strict=True))
    refuse_unless(small, "AveragePool with pads of more than half of its kernel")
    function = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[rank - 1]
    return function(x, kernel_shape, strides or [1] * rank, before, False, bool(count_include_pad))


def global_average_pool(x: Value) -> Value:
    """GlobalAveragePool."""
    return torch.mean(x, tuple(range(2, x.dim())), keepdim=True)


def global_max_pool(x: Value) -> Value:
    """GlobalMaxPool."""
    return torch.amax(x, tuple(range(2, x.dim())), keepdim=True)


def batch_normalization(
    x: Value, scale: Value, bias: Value, mean: Value, variance: Value, *, epsilon: float = 1e-5,
    momentum: float = 0.9, training_mode: int = 0,
) -> Value:  # fmt: skip
    """BatchNormalization by running statistics."""
    refuse_unless(not training_mode, "BatchNormalization with training_mode")
    return F.batch_norm(x, mean, variance, scale, bias, False, 0.0, epsilon)


def instance_normalization(x: Value, scale: Value, bias: Value, *, epsilon: float = 1e-5) -> Value:
    """InstanceNormalization."""
    return F.instance_norm(x, None, None, scale, bias, True, 0.0, epsilon)


def layer_normalization(
    x: Value, scale: Value, bias: Value = None, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1,
    count: int,
) -> Value:  # fmt: skip
    """LayerNormalization; its further outputs are the mean, and the inverse of the standard deviation."""
    shape = list(x.shape[axis:])
    if count == 1:
        offset = None if bias is None else bias.expand(shape)
        return F.layer_norm(x, shape, scale.expand(shape), offset, epsilon)
    axes = tuple(range(x.dim() - len(shape), x.dim()))
    mean = torch.mean(x, axes, keepdim=True)
    inverse = torch.rsqrt(torch.mean((x - mean) * (x - mean), axes, keepdim=True) + epsilon)
    result = (x - mean) * inverse * scale
    return (result if bias is None else result + bias), mean, inverse


def group_normalization(
    x: Value, scale: Value, bias: Value, *, num_groups: int, epsilon: float = 1e-5, stash_type: int = 1
) -> Value:
    """GroupNormalization; before opset 21 with one scale and bias per group."""
    if scale.shape[0] != x.shape[1]:
        scale, bias = (torch.repeat_interleave(one, x.shape[1] // num_groups) for one in (scale, bias))
    return F.group_norm(x, num_groups, scale, bias, epsilon)


def lp_normalization(x: Value, *, axis: int = -1, p: int = 2) -> Value:
    """LpNormalization."""
    norm = torch.linalg.vector_norm(x, ord=p, dim=axis, keepdim=True)
    return torch.where(norm == 0, 0.0, x / torch.where(norm == 0, 1.0, norm))


def softmax_cross_entropy(
    scores: Value, labels: Value, weights: Value = None, *, ignore_index: int | None = None,
    reduction: str = "mean", count: int,
) -> Value:  # fmt: skip
    """SoftmaxCrossEntropyLoss; its second output is the logarithm of the probabilities."""
    logarithms = torch.log_softmax(scores, 1)
    loss = negative_log_likelihood(
        logarithms, labels, weights, ignore_index=ignore_index, reduction=reduction
    )
    return (loss, logarithms) if count > 1 else loss


def negative_log_likelihood(
    logarithms: Value, labels: Value, weights: Value = None, *, ignore_index: int | None = None,
    reduction: str = "mean",
) -> Value:  # fmt: skip
    """NegativeLogLikelihoodLoss."""
    # PyTorch ignores -100 by default, ONNX no label; then a label that is no class is out of range in both.
    ignored = -100 if ignore_index is None else ignore_index
    places = tensor(labels).to(torch.int64)
    return F.nll_loss(logarithms, places, weights, ignore_index=ignored, reduction=reduction)


LAYERS: dict[str, Callable[..., Value]] = {
    "Softmax": softmax, "LogSoftmax": log_softmax, "Conv": convolution,
    "ConvTranspose": transposed_convolution, "MaxPool": max_pool, "AveragePool": average_pool,
    "GlobalAveragePool": global_average_pool, "GlobalMaxPool": global_max_pool,
    "BatchNormalization": batch_normalization, "InstanceNormalization": instance_normalization,
    "LayerNormalization": layer_normalization, "GroupNormalization": group_normalization,
    "LpNormalization": lp_normalization, "SoftmaxCrossEntropyLoss": softmax_cross_entropy,
    "NegativeLogLikelihoodLoss": negative_log_likelihood,
}  # fmt: skip
