"""Elementwise operators of ONNX."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from torch2ort.trainer.onnx_model.operators.dtypes import DTYPES
from torch2ort.trainer.onnx_model.operators.host_scalars import (
    Value,
    by_number,
    is_host,
    number,
    refuse_unless,
    tensor,
    tensors,
)


def unary(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Value], Value]:
    """Return an operator of one tensor."""

    def run(x: Value) -> Value:
        return function(tensor(x))

    return run


def binary(
    function: Callable[..., torch.Tensor], on_numbers: Callable[..., Any] | None = None
) -> Callable[..., Value]:
    """Return an operator of two tensors, or of two sizes."""

    def run(a: Value, b: Value) -> Value:
        if on_numbers is not None and is_host(a, b):
            return by_number(on_numbers, a, b)
        return function(*tensors(a, b))

    return run


def negated(x: Value) -> Value:
    """Neg."""
    return by_number(operator.neg, x) if is_host(x) else torch.neg(x)


def identity(x: Value) -> Value:
    """Identity."""
    return x


def divided(a: Value, b: Value) -> Value:
    """Div; integers are rounded towards 0."""
    if is_host(a, b):
        return by_number(_towards_zero, a, b)
    one, other = tensors(a, b)
    if one.is_floating_point():
        return one / other
    return torch.div(one, other, rounding_mode="trunc")


def _towards_zero(a: Any, b: Any) -> Any:
    # Sizes are positive, and symbols have no truncation.
    if isinstance(a, int) and isinstance(b, int):
        return int(math.copysign(abs(a) // abs(b), a * b)) if a * b else 0
    return a // b


def remainder(a: Value, b: Value, *, fmod: int = 0) -> Value:
    """Mod: with the divisor's sign, or with fmod the dividend's."""
    if is_host(a, b) and not fmod:
        return by_number(operator.mod, a, b)
    one, other = tensors(a, b)
    return torch.fmod(one, other) if fmod else torch.remainder(one, other)


def power(a: Value, b: Value) -> Value:
    """Pow; the result has the base's dtype."""
    one, other = tensors(a, b)
    return torch.pow(one, other).to(one.dtype)


def folded(function: Callable[..., torch.Tensor]) -> Callable[..., Value]:
    """Return an operator of any number of tensors."""

    def run(*values: Value) -> Value:
        return functools.reduce(function, tensors(*values))

    return run


def mean(*values: Value) -> Value:
    """Mean of several tensors."""
    return functools.reduce(torch.add, tensors(*values)) / len(values)


def least(*values: Value) -> Value:
    """Min of several tensors, or of sizes."""
    if is_host(*values):
        return functools.reduce(lambda a, b: by_number(min, a, b), values)
    return functools.reduce(torch.minimum, tensors(*values))


def greatest(*values: Value) -> Value:
    """Max of several tensors, or of sizes."""
    if is_host(*values):
        return functools.reduce(lambda a, b: by_number(max, a, b), values)
    return functools.reduce(torch.maximum, tensors(*values))


def where(condition: Value, a: Value, b: Value) -> Value:
    """Where."""
    if is_host(condition, a, b):
        return by_number(lambda c, x, y: x if c else y, condition, a, b)
    return torch.where(*tensors(condition, a, b))


def clipped(x: Value, low: Value = None, high: Value = None) -> Value:
    """Clip."""
    if low is None and high is None:
        return x
    return torch.clamp(tensor(x), low, high)


def cast(x: Value, *, to: int, saturate: int = 1) -> Value:
    """Cast."""
    refuse_unless(to in DTYPES, f"Cast to type {to} of ONNX")
    if is_host(x) and DTYPES[to] is torch.int64:
        return by_number(int, x) if not _has_symbols(x) else x
    return tensor(x).to(DTYPES[to])


def _has_symbols(x: Value) -> bool:
    return any(isinstance(one, torch.SymInt) for one in (x if isinstance(x, list) else [x]))


def cast_like(x: Value, like: Value, *, saturate: int = 1) -> Value:
    """CastLike."""
    one, other = tensors(x, like)
    return one.to(other.dtype)


def gelu(x: Value, *, approximate: str = "none") -> Value:
    """Gelu."""
    return F.gelu(tensor(x), approximate=approximate)


def fast_gelu(x: Value, bias: Value = None) -> Value:
    """FastGelu of ONNX Runtime."""
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


def bias_gelu(x: Value, bias: Value) -> Value:
    """BiasGelu of ONNX Runtime."""
    return F.gelu(x + bias)


def quick_gelu(x: Value, *, alpha: float = 1.702) -> Value:
    """QuickGelu of ONNX Runtime."""
    return x * torch.sigmoid(alpha * x)


def leaky_relu(x: Value, *, alpha: float = 0.01) -> Value:
    """LeakyRelu."""
    return F.leaky_relu(x, alpha)


def elu(x: Value, *, alpha: float = 1.0) -> Value:
    """Elu."""
    return F.elu(x, alpha)


def celu(x: Value, *, alpha: float = 1.0) -> Value:
    """Celu."""
    return F.celu(x, alpha)


def selu(x: Value, *, alpha: float = 1.6732631921768188, gamma: float = 1.0507010221481323) -> Value:
    """Selu."""
    return gamma * torch.where(x > 0, x, alpha * (torch.exp(torch.clamp(x, max=0)) - 1))


def prelu(x: Value, slope: Value) -> Value:
    """PRelu."""
    return torch.where(x >= 0, x, x * slope)


def hard_sigmoid(x: Value, *, alpha: float = 0.2, beta: float = 0.5) -> Value:
    """HardSigmoid."""
    return torch.clamp(alpha * x + beta, 0, 1)


def thresholded_relu(x: Value, *, alpha: float = 1.0) -> Value:
    """ThresholdedRelu."""
    return torch.where(x > alpha, x, torch.zeros_like(x))


def is_infinite(x: Value, *, detect_negative: int = 1, detect_positive: int = 1) -> Value:
    """IsInf."""
    found = torch.isinf(x)
    if not detect_negative:
        found = found & (x > 0)
    return found if detect_positive else found & (x < 0)


def cumulative_sum(x: Value, axis: Value, *, exclusive: int = 0, reverse: int = 0) -> Value:
    """CumSum."""
    dim = int(number(axis, "the axis of CumSum"))
    turned = torch.flip(x, [dim]) if reverse else x
    total = torch.cumsum(turned, dim, dtype=x.dtype)
    total = total - turned if exclusive else total
    return torch.flip(total, [dim]) if reverse else total


ELEMENTWISE: dict[str, Callable[..., Value]] = {
    **{
        name: unary(getattr(torch, name.lower()))
        for name in (
            "Abs", "Exp", "Log", "Sqrt", "Reciprocal", "Floor", "Ceil", "Round", "Sign", "Sin", "Cos", "Tan",
            "Asin", "Acos", "Atan", "Sinh", "Cosh", "Tanh", "Asinh", "Acosh", "Atanh", "Erf", "Relu",
            "Sigmoid",
        )
    },
    "Softplus": unary(F.softplus), "Softsign": unary(F.softsign), "Mish": unary(F.mish),
    "HardSwish": unary(F.hardswish), "Not": unary(torch.logical_not), "IsNaN": unary(torch.isnan),
    "Neg": negated, "Identity": identity, "Div": divided, "Mod": remainder, "Pow": power,
    "Add": binary(torch.add, operator.add), "Sub": binary(torch.sub, operator.sub),
    "Mul": binary(torch.mul, operator.mul), "And": binary(torch.logical_and),
    "Or": binary(torch.logical_or), "Xor": binary(torch.logical_xor),
    "Equal": binary(torch.eq, operator.eq), "Greater": binary(torch.gt, operator.gt),
    "GreaterOrEqual": binary(torch.ge, operator.ge), "Less": binary(torch.lt, operator.lt),
    "LessOrEqual": binary(torch.le, operator.le), "Sum": folded(torch.add), "Mean": mean, "Min": least,
    "Max": greatest, "Where": where, "Clip": clipped, "Cast": cast, "CastLike": cast_like, "Gelu": gelu,
    "LeakyRelu": leaky_relu, "Elu": elu, "Celu": celu, "Selu": selu, "PRelu": prelu,
    "HardSigmoid": hard_sigmoid, "ThresholdedRelu": thresholded_relu, "IsInf": is_infinite,
    "CumSum": cumulative_sum, "com.microsoft.Gelu": gelu, "com.microsoft.FastGelu": fast_gelu,
    "com.microsoft.BiasGelu": bias_gelu, "com.microsoft.QuickGelu": quick_gelu,
}  # fmt: skip
