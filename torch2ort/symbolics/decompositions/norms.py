"""Decompositions of normalizations, with their running statistics."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from torch2ort.program.decomposition_table import EXPORTED, decomposes

aten = torch.ops.aten

_Five = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


_F = TypeVar("_F", bound=Callable[..., Any])


def in_single_precision(decomposition: _F) -> _F:
    """Compute inputs of half precision in float32, as eager does, independently of the parameters' type."""

    @functools.wraps(decomposition)
    def decompose(input: torch.Tensor, *args: Any) -> Any:
        if input.dtype not in (torch.float16, torch.bfloat16):
            return decomposition(input, *args)
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        # Statistics of the batch have the type of the parameters, new running statistics that of the old
        # ones.
        kind = tensors[0].dtype if tensors else input.dtype
        wide = decomposition(input.float(), *(a.float() if isinstance(a, torch.Tensor) else a for a in args))
        if isinstance(wide, torch.Tensor):
            return wide.to(input.dtype)
        output, mean, inverse, *new = wide
        old = tensors[len(tensors) - len(new) :]
        return (
            output.to(input.dtype),
            mean.to(kind),
            inverse.to(kind),
            *(value.to(before.dtype) for value, before in zip(new, old, strict=True)),
        )

    return decompose  # type: ignore[return-value]


@decomposes(aten._native_batch_norm_legit_functional.default)
@in_single_precision
def batch_norm_functional(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> _Five:
    """Return output, mean, inverse standard deviation, and the new running statistics."""
    if not training:
        output = by_statistics(input, running_mean, torch.rsqrt(running_var + eps), weight, bias)
        return (
            output,
            running_mean.new_zeros(0),
            running_var.new_zeros(0),
            running_mean.clone(),
            running_var.clone(),
        )
    output, mean, var, inverse = _normalize(input, weight, bias, eps)
    n = input.numel() // input.shape[1]
    unbiased = var.detach() * (n / (n - 1))
    new_mean = running_mean * (1 - momentum) + mean.detach() * momentum
    new_var = running_var * (1 - momentum) + unbiased * momentum
    return output, mean, inverse, new_mean, new_var


@decomposes(aten._native_batch_norm_legit.no_stats)
@in_single_precision
def batch_norm_without_stats(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Three:
    """Return output, mean and inverse standard deviation, by the statistics of the batch."""
    output, mean, _, inverse = _normalize(input, weight, bias, eps)
    return output, mean, inverse


@decomposes(aten._native_batch_norm_legit_functional.default, table=EXPORTED)
def whole_batch_norm(input: torch.Tensor, *args: Any) -> _Five:
    """Keep the operator if it uses statistics of the batch, except in double: ONNX's epsilon is a float32."""
    *_, training, _, _ = args
    if not training or input.dtype is torch.float64:
        return batch_norm_functional(input, *args)
    if input.dtype not in (torch.float16, torch.bfloat16):
        return NotImplemented  # type: ignore[no-any-return]
    whole = in_single_precision(aten._native_batch_norm_legit_functional.default)
    return whole(input, *args)  # type: ignore[no-any-return]


@decomposes(aten._native_batch_norm_legit_no_training.default, table=EXPORTED)
def batch_norm_by_running_statistics(input: torch.Tensor, *args: Any) -> Three:
    """Decompose the operator in double precision."""
    if input.dtype is not torch.float64:
        return NotImplemented  # type: ignore[no-any-return]
    weight, bias, mean, var, momentum, eps = args
    return batch_norm_functional(input, weight, bias, mean, var, False, momentum, eps)[:3]


@decomposes(aten.instance_norm.default)
def instance_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> torch.Tensor:
    """Compute a group normalization with one channel per group, or normalize by the running statistics."""
    if not use_input_stats:
        assert running_mean is not None
        assert running_var is not None
        output = by_statistics(input, running_mean, torch.rsqrt(running_var + eps), weight, bias)
        return output.to(input.dtype)
    if running_mean is not None and running_var is not None:
        flat = input.detach().flatten(2)
        n = flat.shape[2]
        mean = flat.mean(2)
        var = (flat - mean.unsqueeze(2)).square().mean(2) * (n / (n - 1))
        running_mean.copy_(running_mean * (1 - momentum) + mean.mean(0) * momentum)
        running_var.copy_(running_var * (1 - momentum) + var.mean(0) * momentum)
    return scale(normalize_groups(input, input.shape[0], input.shape[1], eps), weight, bias).to(input.dtype)


def _normalize(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    axes = [0, *range(2, input.dim())]
    mean = input.mean(axes, keepdim=True)
    centered = input - mean
    var = (centered * centered).mean(axes, keepdim=True)
    inverse = torch.rsqrt(var + eps)
    factor = inverse if weight is None else inverse * _per_channel(weight, input)
    output = centered * factor
    if bias is not None:
        output = output + _per_channel(bias, input)
    return output, mean.flatten(), var.flatten(), inverse.flatten()


def normalize_groups(input: torch.Tensor, n: int, groups: int, eps: float) -> torch.Tensor:
    """Normalize each group of channels by its own statistics."""
    flat = grouped(input, n, groups)
    return torch.layer_norm(flat, [flat.shape[2]], None, None, eps).reshape(input.shape)


def grouped(input: torch.Tensor, n: int, groups: int) -> torch.Tensor:
    """Reshape ``input`` to the batch, its groups of channels, and the elements of each group."""
    # The size is explicit, as -1 is ambiguous in a batch without elements.
    return input.reshape(n, groups, input.shape[1] // groups * math.prod(input.shape[2:]))


def by_statistics(
    input: torch.Tensor,
    mean: torch.Tensor,
    inverse: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Normalize by given statistics."""
    factor = inverse if weight is None else inverse * weight
    output = (input - _per_channel(mean, input)) * _per_channel(factor, input)
    return output if bias is None else output + _per_channel(bias, input)


def scale(output: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply by a weight and add a bias per channel."""
    if weight is not None:
        output = output * _per_channel(weight, output)
    return output if bias is None else output + _per_channel(bias, output)


def _per_channel(vector: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return vector.reshape([1, -1] + [1] * (like.dim() - 2))
