"""Which operators PyTorch's kernels do where onnxruntime-training differentiates: better, or at less cost."""

from __future__ import annotations

from typing import Any

import torch

from torch2ort.kernels.derivatives import DERIVATIVES
from torch2ort.kernels.large import is_large
from torch2ort.sizes.symbols import has_hint
from torch2ort.symbolics.half_precision import computes_in_half
from torch2ort.symbolics.sites import arguments_of

aten = torch.ops.aten

# From torch 2.15 on these select instead of sorting, so that their parts are no guide to their gradient.
WHOLE = frozenset(
    {
        aten.quantile.default,
        aten.quantile.scalar,
        aten.nanquantile.default,
        aten.nanquantile.scalar,
    }
)

# ONNX Runtime's normalization of rows knows no spread that is small beside the mean.
# Logarithms, roots: onnxruntime-training takes the smallest numbers for others, and the root of infinity
# for NaN.
# Maxima of windows: onnxruntime-training's pass NaN over, and take the smallest number for minus infinity.
# Quantised steps: the gradient builder fails on a step of one number.
# sigmoid: it is zero for large negative numbers, of which losses take the logarithm.
# topk, quantiles: ties are broken as PyTorch's kernel breaks them, which decides where the gradient goes.
# The others: their parts have no gradient, or another, at zero, at the ends of their range, of large numbers.
_KERNELS = frozenset(
    {
        aten.layer_norm.default,
        aten.native_layer_norm.default,
        *WHOLE,
        aten.fake_quantize_per_channel_affine.default,
        aten.fake_quantize_per_tensor_affine.default,
        aten.fake_quantize_per_tensor_affine.tensor_qparams,
        aten.max_pool1d.default,
        aten.max_pool1d_with_indices.default,
        aten.max_pool2d.default,
        aten.max_pool2d_with_indices.default,
        aten.max_pool3d.default,
        aten.max_pool3d_with_indices.default,
        aten.topk.default,
        aten.erf.default,
        aten.log.default,
        aten.log10.default,
        aten.log2.default,
        aten.log_sigmoid_forward.default,
        aten.rsqrt.default,
        aten.sigmoid.default,
        aten.sqrt.default,
        aten.sinc.default,
        aten.std.correction,
        aten.std_mean.correction,
    }
)

_PRODUCTS = frozenset(
    {
        aten.addmm.default,
        aten.baddbmm.default,
        aten.bmm.default,
        aten.linear.default,
        aten.matmul.default,
        aten.mm.default,
    }
)

# In ONNX they are made of constants or comparisons, which leave no way for PyTorch's gradient, zeros, or for
# the error that there is none.
_WITHOUT_A_WAY_BACK = frozenset({aten.angle.default, aten.heaviside.default})
_FILLS = frozenset({aten.fill.Scalar, aten.fill.Tensor})
# They put what a part was filled with into the whole, from which there is another way back.
_PUTS_INTO_A_WHOLE = frozenset({aten.select_scatter.default, aten.slice_scatter.default})

# Their derivatives by ONNX Runtime, or by that of their parts, are not eager's at every number.
_EXACT = frozenset({aten.hardswish.default, aten.mish.default})


def prefers_kernel(node: torch.fx.Node) -> bool:
    """Whether PyTorch's kernel does ``node``, unless a user registered a translation."""
    if node.target in _KERNELS:
        return True
    # The derivative of its root is infinite at zero.
    return node.target is aten.linalg_vector_norm.default and 0 < arguments_of(node)["ord"] < 1


def needs_kernel(node: torch.fx.Node, gradient: frozenset[torch.fx.Node]) -> bool:
    """Whether ``node`` is PyTorch's kernel's whatever users have registered.

    Args:
        node: of a program that is differentiated.
        gradient: the nodes that carry a gradient.
    """
    if node in gradient and (_is_empty(node) or _is_better_in_pytorch(node, gradient)):
        return True
    # What is not differentiated may compute in half precision, which ONNX Runtime has few kernels for.
    return computes_in_half(node)


def _is_empty(node: torch.fx.Node) -> bool:
    """Whether ``node`` takes or gives a tensor without elements, which many gradient kernels divide by.

    Of a product whose size is known in a run alone, it may.
    """
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    sizes: list[Any] = [d for v in values if isinstance(v, torch.Tensor) for d in v.shape]
    if node.target in _PRODUCTS and any(not isinstance(d, int) and not has_hint(d) for d in sizes):
        return True
    return any(isinstance(d, int) and d == 0 for d in sizes)


def _is_better_in_pytorch(node: torch.fx.Node, gradient: frozenset[torch.fx.Node]) -> bool:
    """Whether PyTorch's kernels do ``node`` and its derivative exactly, or a call of them pays."""
    if node.target in _WITHOUT_A_WAY_BACK:
        return True
    if node.target in _FILLS:
        return any(user.target not in _PUTS_INTO_A_WHOLE for user in node.users)
    if node.target not in DERIVATIVES:
        return False
    if node.target is aten.div.Tensor:
        # ONNX Runtime squares the divisor, which is zero or infinite for numbers that are neither.
        return node.args[1] in gradient and _of_one_dtype(node)
    # The kernel of an embedding also looks at the indices.
    return node.target in _EXACT or node.target is aten.embedding.default or is_large(node.meta["val"])


def _of_one_dtype(node: torch.fx.Node) -> bool:
    values = [n.meta["val"] for n in node.all_input_nodes]
    return len({v.dtype for v in values if isinstance(v, torch.Tensor)}) == 1
