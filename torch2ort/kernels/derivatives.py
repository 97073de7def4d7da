"""ATen operators together with the ATen operators that are their derivatives.

Each pair is what autograd itself would call, without a graph of autograd's in between: that makes it
cheap enough for operators that ONNX Runtime could differentiate too, but with a slower kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch2ort.kernels._torch_private import OpOverload

aten = torch.ops.aten
Tensors = Sequence[torch.Tensor]
# An operator's arguments by name; in backward something other than None stands for each tensor.
Arguments = Mapping[str, Any]
Gradients = dict[str, "torch.Tensor | None"]


@dataclass(frozen=True, slots=True)
class Derivative:
    """How an operator runs forward and backward.

    Attributes:
        forward: from the operator's arguments to its result and the tensors to save.
        backward: from the result's gradient, the saved tensors, the arguments, and the names of the
            tensor arguments that need a gradient, to gradients by name.
        saves_result: whether the result itself is among the saved tensors.
    """

    forward: Callable[[Arguments], tuple[torch.Tensor, Tensors]]
    backward: Callable[[torch.Tensor, Tensors, Arguments, frozenset[str]], Gradients]
    saves_result: bool = False


def _of_one(
    operator: Any, derivative: Callable[..., Any], names: str = "", *, saves_result: bool = False
) -> Derivative:
    """The pair of an operator of the tensor ``self`` and of numbers.

    Args:
        operator: called with ``self`` and the numbers.
        derivative: called with the gradient, what is saved, and the numbers.
        names: names of the numbers.
        saves_result: whether the result is saved, else ``self`` is.
    """
    order = names.split()

    def forward(a: Arguments) -> tuple[torch.Tensor, Tensors]:
        result = operator(a["self"], *(a[n] for n in order))
        return result, (result if saves_result else a["self"],)

    def backward(grad: torch.Tensor, saved: Tensors, a: Arguments, needed: frozenset[str]) -> Gradients:
        return {"self": derivative(grad, saved[0], *(a[n] for n in order))}

    return Derivative(forward, backward, saves_result)


def _gelu(x: torch.Tensor, approximate: str) -> Any:
    return aten.gelu(x, approximate=approximate)


def _gelu_backward(grad: torch.Tensor, x: torch.Tensor, approximate: str) -> Any:
    return aten.gelu_backward(grad, x, approximate=approximate)


def _elu_backward(grad: torch.Tensor, x: torch.Tensor, alpha: float, scale: float, input_scale: float) -> Any:
    return aten.elu_backward(grad, alpha, scale, input_scale, False, x)


def _leaky_relu_backward(grad: torch.Tensor, x: torch.Tensor, slope: float) -> Any:
    return aten.leaky_relu_backward(grad, x, slope, False)


def _relu_backward(grad: torch.Tensor, result: torch.Tensor) -> Any:
    return aten.threshold_backward(grad, result, 0)


def _layer_norm(a: Arguments) -> tuple[torch.Tensor, Tensors]:
    x, weight, bias = a["input"], a["weight"], a["bias"]
    result, mean, inverse = aten.native_layer_norm(x, a["normalized_shape"], weight, bias, a["eps"])
    return result, (x, mean, inverse, *_given(weight, bias))


def _layer_norm_backward(
    grad: torch.Tensor, saved: Tensors, a: Arguments, needed: frozenset[str]
) -> Gradients:
    x, mean, inverse, *given = saved
    weight, bias = _put_back(given, a)
    found = aten.native_layer_norm_backward(
        grad, x, a["normalized_shape"], mean, inverse, weight, bias, _mask(needed)
    )
    return dict(zip(_NORM, found, strict=True))


def _group_norm(a: Arguments) -> tuple[torch.Tensor, Tensors]:
    x, weight, bias = a["input"], a["weight"], a["bias"]
    result, mean, inverse = aten.native_group_norm(
        x.contiguous(), weight, bias, *_sizes(x), a["num_groups"], a["eps"]
    )
    return result, (x, mean, inverse, *_given(weight))


def _group_norm_backward(
    grad: torch.Tensor, saved: Tensors, a: Arguments, needed: frozenset[str]
) -> Gradients:
    x, mean, inverse, *given = saved
    found = aten.native_group_norm_backward(
        grad, x, mean, inverse, given[0] if given else None, *_sizes(x), a["num_groups"], _mask(needed)
    )
    return dict(zip(_NORM, found, strict=True))


_NORM = ("input", "weight", "bias")


def _sizes(x: torch.Tensor) -> tuple[int, int, int]:
    n, channels, *space = x.shape
    return n, channels, math.prod(space)


def _given(*tensors: torch.Tensor | None) -> Tensors:
    return [t for t in tensors if t is not None]


def _put_back(given: Tensors, a: Arguments) -> list[torch.Tensor | None]:
    supply = iter(given)
    return [None if a[name] is None else next(supply) for name in ("weight", "bias")]


def _mask(needed: frozenset[str]) -> list[bool]:
    return [name in needed for name in _NORM]


def _embedding(a: Arguments) -> tuple[torch.Tensor, Tensors]:
    # Nothing of the weight is needed in backward but its number of rows.
    rows = torch.empty(a["weight"].shape[0], 0)
    return aten.embedding(a["weight"], a["indices"], a["padding_idx"], a["scale_grad_by_freq"]), (
        a["indices"],
        rows,
    )


def _embedding_backward(
    grad: torch.Tensor, saved: Tensors, a: Arguments, needed: frozenset[str]
) -> Gradients:
    indices, rows = saved
    found = aten.embedding_dense_backward(
        grad, indices, rows.shape[0], a["padding_idx"], a["scale_grad_by_freq"]
    )
    return {"weight": found}


def _div(a: Arguments) -> tuple[torch.Tensor, Tensors]:
    # The divisor may be a number.
    divisor = torch.as_tensor(a["other"], dtype=a["self"].dtype)
    return a["self"] / a["other"], (a["self"], divisor)


def _div_backward(grad: torch.Tensor, saved: Tensors, a: Arguments, needed: frozenset[str]) -> Gradients:
    dividend, divisor = saved
    found: Gradients = {}
    if "self" in needed:
        found["self"] = (grad / divisor).sum_to_size(dividend.shape)
    if "other" in needed:
        found["other"] = (-grad * (dividend / divisor / divisor)).sum_to_size(divisor.shape)
    return found


def _sqrt_backward(grad: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    return grad / (2 * result)


def _rsqrt_backward(grad: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    return -0.5 * grad * result.pow(3)


def _log_backward(base: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    factor = math.log(base)
    return lambda grad, x: grad / (x * factor)


DERIVATIVES: dict[OpOverload, Derivative] = {
    aten.div.Tensor: Derivative(_div, _div_backward),
    aten.elu.default: _of_one(aten.elu, _elu_backward, "alpha scale input_scale"),
    aten.embedding.default: Derivative(_embedding, _embedding_backward),
    aten.gelu.default: _of_one(_gelu, _gelu_backward, "approximate"),
    aten.group_norm.default: Derivative(_group_norm, _group_norm_backward),
    aten.hardsigmoid.default: _of_one(aten.hardsigmoid, aten.hardsigmoid_backward),
    aten.hardswish.default: _of_one(aten.hardswish, aten.hardswish_backward),
    aten.hardtanh.default: _of_one(aten.hardtanh, aten.hardtanh_backward, "min_val max_val"),
    aten.layer_norm.default: Derivative(_layer_norm, _layer_norm_backward),
    aten.leaky_relu.default: _of_one(aten.leaky_relu, _leaky_relu_backward, "negative_slope"),
    aten.log.default: _of_one(aten.log, aten.div),
    aten.log10.default: _of_one(aten.log10, _log_backward(10)),
    aten.log2.default: _of_one(aten.log2, _log_backward(2)),
    aten.mish.default: _of_one(aten.mish, aten.mish_backward),
    aten.relu.default: _of_one(aten.relu, _relu_backward, saves_result=True),
    aten.rsqrt.default: _of_one(aten.rsqrt, _rsqrt_backward, saves_result=True),
    aten.sigmoid.default: _of_one(aten.sigmoid, aten.sigmoid_backward, saves_result=True),
    aten.silu.default: _of_one(aten.silu, aten.silu_backward),
    aten.sqrt.default: _of_one(aten.sqrt, _sqrt_backward, saves_result=True),
    aten.softplus.default: _of_one(aten.softplus, aten.softplus_backward, "beta threshold"),
}
