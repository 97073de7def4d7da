"""Normalizations whose ONNX operators have no gradient, or another."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch2ort.engines.ort_training.decompositions.table import decomposes
from torch2ort.symbolics.decompositions.normalization import (
    Three,
    by_statistics,
    grouped,
    normalize_groups,
    scale,
)

aten = torch.ops.aten


@decomposes(aten._native_batch_norm_legit_no_training.default)
def batch_norm_inference(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    eps: float,
) -> Three:
    """By the running statistics; onnxruntime-training would take a BatchNormalization for a training one."""
    output = by_statistics(input, running_mean, torch.rsqrt(running_var + eps), weight, bias)
    return output, running_mean.new_zeros(0), running_var.new_zeros(0)


@decomposes(aten.group_norm.default)
def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> torch.Tensor:
    """As a layer normalization of each group, scaled per channel."""
    output = normalize_groups(input, input.shape[0], num_groups, eps)
    return scale(output, weight, bias)


@decomposes(aten.native_group_norm.default)
def native_group_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    n: int,
    c: int,
    hxw: int,
    group: int,
    eps: float,
) -> Three:
    """Output, means and inverse standard deviations of the groups."""
    groups = grouped(input, n, group)
    mean = groups.mean(2)
    var = (groups - mean.unsqueeze(2)).square().mean(2)
    return group_norm(input, group, weight, bias, eps), mean, torch.rsqrt(var + eps)


@decomposes(aten.rms_norm.default)
def rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """``input / sqrt(mean(input ** 2) + eps) * weight``."""
    axes = list(range(-len(normalized_shape), 0))
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    output = input * torch.rsqrt((input * input).mean(axes, keepdim=True) + eps)
    return output if weight is None else output * weight
