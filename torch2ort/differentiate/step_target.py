"""What the halves of a step are translated for."""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from dataclasses import replace

import torch

from torch2ort._torch.dispatch import OpOverload
from torch2ort.differentiate.op_signature import signature
from torch2ort.program.target import GradientRules, GradientSource, Target
from torch2ort.sizes.symbols import has_hint, size_hint
from torch2ort.symbolics.backward_decompositions import with_small_derivatives

# What ONNX does as well as PyTorch's kernels. All else, derivatives and what functionalisation leaves among
# it, runs in those: nobody compared torch.onnx's translations of it.
_IN_ONNX = frozenset(
    {
        "_log_softmax", "_softmax", "_to_copy", "_unsafe_view", "add", "addmm", "alias", "arange",
        "baddbmm", "bmm", "cat", "clone", "convolution", "cos", "detach", "div", "empty_like", "eq", "exp",
        "expand", "full", "full_like", "ge", "gelu", "gt", "le", "logical_and", "logical_not", "logical_or",
        "lt", "mean", "mm", "mul", "ne", "neg", "ones", "ones_like", "permute", "relu", "rsub",
        "scalar_tensor", "sin", "squeeze", "sub", "sum", "sym_size", "t", "tanh", "transpose", "unsqueeze",
        "view", "where", "zeros", "zeros_like",
    }
)  # fmt: skip
# Onnxruntime takes four times as long for each of them; a call costs as much as some 30,000.
_MANY = 1 << 15


def is_left_to_pytorch(node: torch.fx.Node) -> bool:
    """Whether PyTorch's kernel does a node of a half."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return False
    name = target._schema.name.removeprefix("aten::")
    return name not in _IN_ONNX or (name == "_to_copy" and _rounds_many(node))


def _rounds_many(node: torch.fx.Node) -> bool:
    """Whether so many numbers become bfloat16 that PyTorch's faster kernel is worth the call."""
    given, made = (n.meta.get("val") for n in (node.args[0], node))  # type: ignore[union-attr]
    if not isinstance(given, torch.Tensor) or not isinstance(made, torch.Tensor):
        return False
    rounds = given.dtype is torch.float32 and made.dtype is torch.bfloat16 and all(map(has_hint, made.shape))
    return rounds and math.prod(size_hint(size) for size in made.shape) >= _MANY


_RULES = GradientRules(
    source=GradientSource.HALVES,
    decompositions=with_small_derivatives,
    needs_kernel=is_left_to_pytorch,
)


def half_of(target: Target, in_onnx: Container[str] = ()) -> Target:
    """What a half of a step is for, in an engine whose graphs are for ``target``.

    Args:
        target: of the engine's graphs.
        in_onnx: signatures of operators that ONNX does besides, see
            :func:`torch2ort.differentiate.op_signature.signature`.
    """
    rules = _RULES if not in_onnx else replace(_RULES, needs_kernel=_besides(in_onnx))
    return replace(target, gradients=rules, rounds_as_eager=True)


def _besides(in_onnx: Container[str]) -> Callable[[torch.fx.Node], bool]:
    def is_left(node: torch.fx.Node) -> bool:
        return is_left_to_pytorch(node) and signature(node) not in in_onnx

    return is_left
