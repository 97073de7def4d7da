"""Operators of a half that can be part of a fused region.

These operators pass over their input once or a few times, in a dtype in which torch's inductor was compared
with eager PyTorch here. Random numbers, indexing and sorting are not fused.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from torch2ort._torch.dispatch import OpOverload
from torch2ort.differentiate.aliasing import VIEWS
from torch2ort.sizes.symbols import bounds, has_hint

aten = torch.ops.aten

POINTWISE = frozenset(
    {
        "abs", "add", "bitwise_and", "bitwise_not", "bitwise_or", "ceil", "clamp", "clamp_max", "clamp_min",
        "clone", "cos", "div", "elu", "elu_backward", "eq", "erf", "exp", "expm1", "floor", "ge", "gelu",
        "gelu_backward", "gt", "hardsigmoid", "hardsigmoid_backward", "hardswish", "hardswish_backward",
        "hardtanh", "hardtanh_backward", "le", "leaky_relu", "leaky_relu_backward", "log", "log1p",
        "logical_and", "logical_not", "logical_or", "lt", "masked_fill", "maximum", "minimum", "mul", "ne",
        "neg", "pow", "reciprocal", "relu", "rsqrt", "rsub", "sigmoid", "sigmoid_backward", "sign", "silu",
        "silu_backward", "sin", "softplus", "softplus_backward", "sqrt", "sub", "tanh", "tanh_backward",
        "threshold_backward", "where", "_to_copy",
    }
)  # fmt: skip
_REDUCTIONS = frozenset(
    {
        "_log_softmax", "_log_softmax_backward_data", "_native_batch_norm_legit_functional", "_softmax",
        "_softmax_backward_data", "mean", "native_batch_norm", "native_batch_norm_backward",
        "native_group_norm", "native_group_norm_backward", "native_layer_norm", "native_layer_norm_backward",
        "sum",
    }
)  # fmt: skip
MADE = frozenset({"full", "full_like", "ones", "ones_like", "scalar_tensor", "zeros", "zeros_like"})
# Overloads of these names that compute something else.
_OTHER = frozenset(
    {aten.div.Tensor_mode, aten.div.Scalar_mode, aten.pow.Tensor_Tensor, aten.pow.Scalar, aten.where.default}
)
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.bool})


def name_of(node: torch.fx.Node) -> str:
    """Return ``add`` for a call of ``aten.add.Tensor``; empty for a node that calls no operator of ATen's."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return ""
    return str(node.target._schema.name.removeprefix("aten::"))


def is_fusible(node: torch.fx.Node) -> bool:
    """Return True if a node can be part of a region."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_fusible(node.args[0])  # type: ignore[arg-type]
    name = name_of(node)
    if not name or node.target in _OTHER:
        return False
    if node.target not in VIEWS and name not in POINTWISE and name not in _REDUCTIONS and name not in MADE:
        return False
    if not all(_is_plain(n.meta.get("val")) or _is_size(n) for n in node.all_input_nodes):
        return False
    given = node.meta["val"]
    return all(v is None or _is_plain(v) for v in (given if isinstance(given, (list, tuple)) else (given,)))


def _is_size(node: torch.fx.Node) -> bool:
    """Return True if a node is an integer from the sizes of the graph's inputs, and never negative."""
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt) and _is_determined(value, 0)


def _is_plain(value: Any) -> bool:
    """Return True if a value is a tensor with a dtype, device and sizes that compiled code supports."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype in _DTYPES
        and value.device.type == "cpu"
        and all(size > 0 if isinstance(size, int) else _is_determined(size, 1) for size in value.shape)
    )


def _is_determined(size: torch.SymInt, least: int) -> bool:
    """Return True if the sizes of the graph's inputs determine a number that is at least ``least``."""
    lower, _ = bounds(size)
    return has_hint(size) and lower is not None and lower >= least
