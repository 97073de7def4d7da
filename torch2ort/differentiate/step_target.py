"""The target of the halves of a step."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import replace
from typing import cast

import torch

from torch2ort._torch.dispatch import OpOverload
from torch2ort.differentiate.op_signature import LARGE, elements, signature
from torch2ort.program.target import GradientRules, GradientSource, Target
from torch2ort.sizes.symbols import has_hint, size_hint
from torch2ort.symbolics.backward_decompositions import with_small_derivatives

aten = torch.ops.aten
# Operators that ONNX Runtime computes as well as PyTorch's kernels. All others run in those kernels,
# including derivatives and operators from functionalisation, as torch.onnx's translations of them are
# untested.
_IN_ONNX = frozenset(
    {
        "_log_softmax", "_softmax", "_to_copy", "_unsafe_view", "add", "addmm", "alias", "arange",
        "baddbmm", "bmm", "cat", "clone", "convolution", "cos", "detach", "div", "empty_like", "eq",
        "exp", "expand", "full", "full_like", "ge", "gelu", "gt", "le", "logical_and", "logical_not",
        "logical_or", "lt", "mean", "mm", "mul", "ne", "neg", "ones", "ones_like", "permute", "relu",
        "rsub", "scalar_tensor", "select", "sin", "slice", "split", "split_with_sizes", "squeeze", "sub",
        "sum", "sym_size", "t", "tanh", "transpose", "unsqueeze", "view", "where", "zeros", "zeros_like",
    }
)  # fmt: skip
# Onnxruntime takes four times as long for each element; a call costs as much as some 30,000 elements.
_MANY = 1 << 15
# Input channels from which on oneDNN's convolution is faster than ONNX Runtime's.
_WIDE = 32


def is_left_to_pytorch(node: torch.fx.Node) -> bool:
    """Return True if PyTorch's kernel computes a node of a half."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return False
    name = target._schema.name.removeprefix("aten::")
    return name not in _IN_ONNX or (name == "_to_copy" and _rounds_many(node))


def _rounds_many(node: torch.fx.Node) -> bool:
    """Return True if so many numbers become bfloat16 that PyTorch's faster kernel is worth the call."""
    given, made = (n.meta.get("val") for n in (node.args[0], node))  # type: ignore[union-attr]
    if not isinstance(given, torch.Tensor) or not isinstance(made, torch.Tensor):
        return False
    rounds = given.dtype is torch.float32 and made.dtype is torch.bfloat16 and all(map(has_hint, made.shape))
    return rounds and math.prod(size_hint(size) for size in made.shape) >= _MANY


def is_faster_in_kernel(node: torch.fx.Node, names: Container[str]) -> bool:
    """Return True for a large node of a half, if PyTorch's kernels compute its operator faster.

    Args:
        node: of the half.
        names: the names of these operators.
    """
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return False
    if target._schema.name.removeprefix("aten::") not in names:
        return False
    tensors = [n.meta["val"] for n in (node, *node.all_input_nodes)]
    if not all(isinstance(t, torch.Tensor) and t.dtype.is_floating_point for t in tensors):
        return False
    if target is aten.convolution.default and not _is_wide(node):
        return False
    sizes = [size for t in tensors for size in t.shape]
    return all(map(has_hint, sizes)) and elements(node) >= LARGE


def _is_wide(convolution: torch.fx.Node) -> bool:
    """Return True if a convolution reads so many channels that ONNX Runtime's kernel is slower."""
    *_, transposed, _, groups = convolution.args
    channels = cast(torch.fx.Node, convolution.args[0]).meta["val"].shape[1]
    return bool(not transposed and groups == 1 and has_hint(channels) and size_hint(channels) >= _WIDE)


def half_of(target: Target, in_onnx: Container[str] = ()) -> Target:
    """Return the target of a half of a step, in an engine whose graphs are for ``target``.

    Args:
        target: the target of the engine's graphs.
        in_onnx: signatures of operators that ONNX Runtime computes against the rule, see
            :func:`torch2ort.differentiate.op_signature.signature`.
    """

    def needs_kernel(node: torch.fx.Node) -> bool:
        is_ruled = is_left_to_pytorch(node) or is_faster_in_kernel(node, target.in_kernels)
        return is_ruled and not (in_onnx and signature(node) in in_onnx)

    rules = GradientRules(
        source=GradientSource.HALVES, decompositions=with_small_derivatives, needs_kernel=needs_kernel
    )
    return replace(target, gradients=rules, rounds_as_eager=True)
