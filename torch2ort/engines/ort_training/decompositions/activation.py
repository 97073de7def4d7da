"""Activations whose ONNX operator onnxruntime-training cannot differentiate.

An exponential is only taken of what the branch that uses it can hold: an infinity in the other
branch would come back as a NaN gradient.
"""

from __future__ import annotations

import functools

import torch

from torch2ort.engines.ort_training.decompositions.table import decomposes

aten = torch.ops.aten


def _gradient_at_bound(bound: float | torch.Tensor) -> float:
    """The part of the gradient that eager's clamp passes to what equals its bound."""
    with torch.inference_mode(False), torch.enable_grad():
        tensor = torch.ones((), requires_grad=True)
        (gradient,) = torch.autograd.grad(torch.clamp(tensor, max=bound), tensor)
    return float(gradient)


# Another in each torch: all of it up to 2.13; from 2.15 on none at a number, and half at a tensor.
_AT_NUMBER = _gradient_at_bound(1.0)
_AT_TENSOR = _gradient_at_bound(torch.ones(()))


def _at_least(self: torch.Tensor, bound: float) -> torch.Tensor:
    return torch.where(self < bound, torch.full((), bound, dtype=self.dtype, device=self.device), self)


def _at_most(self: torch.Tensor, bound: float) -> torch.Tensor:
    return torch.where(self > bound, torch.full((), bound, dtype=self.dtype, device=self.device), self)


@decomposes(aten.clamp.default)
def clamp(self: torch.Tensor, min: float | None = None, max: float | None = None) -> torch.Tensor:
    """With eager's gradient at the bounds, which ONNX Runtime's Clip does not give."""
    bounded = self if min is None else _at_least(self, min)
    bounded = bounded if max is None else _at_most(bounded, max)
    if _AT_NUMBER:
        return bounded
    inside = [self > min] if min is not None else []
    inside += [self < max] if max is not None else []
    return torch.where(functools.reduce(torch.logical_and, inside), self, bounded.detach())


@decomposes(aten.clamp_min.default)
def clamp_min(self: torch.Tensor, min: float) -> torch.Tensor:
    """See :func:`clamp`."""
    return clamp(self, min)


@decomposes(aten.clamp_max.default)
def clamp_max(self: torch.Tensor, max: float) -> torch.Tensor:
    """See :func:`clamp`."""
    return clamp(self, None, max)


@decomposes(aten.clamp.Tensor)
def clamp_tensor(
    self: torch.Tensor, min: torch.Tensor | None = None, max: torch.Tensor | None = None
) -> torch.Tensor:
    """See :func:`clamp`; where the tie is shared, as that of a maximum and a minimum."""
    if _AT_TENSOR == 0.5:
        self = self if min is None else torch.maximum(self, min)
        return self if max is None else torch.minimum(self, max)
    if min is not None:
        self = torch.where(self < min, min, self)
    return self if max is None else torch.where(self > max, max, self)


@decomposes(aten.softplus.default)
def softplus(self: torch.Tensor, beta: float = 1, threshold: float = 20) -> torch.Tensor:
    """``log(1 + exp(beta * x)) / beta``, linear above the threshold."""
    scaled = self * beta
    curved = torch.log(torch.exp(_at_most(scaled, threshold)) + 1) / beta
    return torch.where(scaled > threshold, self, curved)


@decomposes(aten.elu.default)
def elu(self: torch.Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> torch.Tensor:
    """``scale * x`` above zero, ``scale * alpha * (exp(input_scale * x) - 1)`` below."""
    curved = (torch.exp(_at_most(self * input_scale, 0)) - 1) * (alpha * scale)
    return torch.where(self > 0, self * scale, curved)


@decomposes(aten.silu.default)
def silu(self: torch.Tensor) -> torch.Tensor:
    """``x * sigmoid(x)``."""
    return self * torch.sigmoid(self)


@decomposes(aten.hardsigmoid.default)
def hardsigmoid(self: torch.Tensor) -> torch.Tensor:
    """``clamp(x / 6 + 1 / 2, 0, 1)``, without gradient at the corners."""
    outside = torch.where(
        self >= 3, torch.ones_like(self), torch.where(self <= -3, torch.zeros_like(self), self.detach())
    )
    return torch.where((self > -3) & (self < 3), self / 6 + 0.5, outside)


@decomposes(aten.hardtanh.default)
def hardtanh(self: torch.Tensor, min_val: float = -1, max_val: float = 1) -> torch.Tensor:
    """A clamp without gradient at its ends."""
    outside = (self <= min_val) | (self >= max_val)
    return torch.where(outside, _at_most(_at_least(self.detach(), min_val), max_val), self)


@decomposes(aten.selu.default)
def selu(self: torch.Tensor) -> torch.Tensor:
    """An elu with the constants of its paper."""
    result: torch.Tensor = aten.elu.default(self, 1.6732632423543772, 1.0507009873554805)
    return result


@decomposes(aten.celu.default)
def celu(self: torch.Tensor, alpha: float = 1) -> torch.Tensor:
    """An elu whose slope is continuous."""
    result: torch.Tensor = aten.elu.default(self, alpha, 1, 1 / alpha)
    return result


@decomposes(aten.prelu.default)
def prelu(self: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x`` above zero, ``weight * x`` below, with one weight or one per channel."""
    if weight.numel() != 1 and self.dim() > 1:
        weight = weight.view([-1 if d == 1 else 1 for d in range(self.dim())])
    return torch.where(self > 0, self, self * weight)


@decomposes(aten.threshold.default)
def threshold(self: torch.Tensor, threshold: float, value: float) -> torch.Tensor:
    """``x`` above the threshold, ``value`` elsewhere."""
    return torch.where(self <= threshold, torch.full((), value, dtype=self.dtype, device=self.device), self)


@decomposes(aten.leaky_relu.default)
def leaky_relu(self: torch.Tensor, negative_slope: float = 0.01) -> torch.Tensor:
    """``x`` above zero, ``negative_slope * x`` below."""
    return torch.where(self > 0, self, self * negative_slope)


@decomposes(aten.glu.default)
def glu(self: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """The first half times the sigmoid of the second."""
    first, second = self.chunk(2, dim)
    return first * torch.sigmoid(second)
