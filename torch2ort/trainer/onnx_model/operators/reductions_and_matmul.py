"""Reductions and matrix products of ONNX."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch2ort.trainer.onnx_model.operators.host_scalars import (
    Value,
    axes_of,
    is_host,
    number,
    numbers,
    product,
    refuse_unless,
    tensor,
    tensors,
)


def reduced(function: Callable[[torch.Tensor, tuple[int, ...], bool], torch.Tensor]) -> Callable[..., Value]:
    """Return a reduction over several axes."""

    def run(x: Value, axes: Value = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Value:
        x = tensor(x)
        empty = axes is None or (is_host(axes) and not numbers(axes, "axes"))
        if empty and noop_with_empty_axes:
            return x
        return function(x, tuple(axes_of(None if empty else axes, x.dim())), bool(keepdims))

    return run


def _product(x: torch.Tensor, axes: tuple[int, ...], keep: bool) -> torch.Tensor:
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, axis, keepdim=keep, dtype=x.dtype)
    return x


def reduce_product(
    x: Value, axes: Value = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Value:
    """ReduceProd, also of sizes."""
    if is_host(x):
        total = product(numbers(x, "ReduceProd"))
        return [total] if keepdims else total
    return reduced(_product)(x, axes, keepdims=keepdims, noop_with_empty_axes=noop_with_empty_axes)


def largest_place(function: Callable[..., torch.Tensor]) -> Callable[..., Value]:
    """Return ArgMax or ArgMin."""

    def run(x: Value, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Value:
        refuse_unless(not select_last_index, "ArgMax or ArgMin with select_last_index")
        return function(x, dim=axis, keepdim=bool(keepdims))

    return run


def top_k(x: Value, k: Value, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> Value:
    """TopK; of equal numbers it selects the first ones, which torch.topk does not guarantee."""
    found = torch.sort(x, dim=axis, descending=bool(largest), stable=True)
    count = int(number(k, "k of TopK"))
    return found.values.narrow(axis, 0, count), found.indices.narrow(axis, 0, count)


def gemm(
    a: Value,
    b: Value,
    c: Value = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Value:
    """Gemm."""
    one = a.t() if transA else a
    other = b.t() if transB else b
    result = one @ other
    result = result if alpha == 1.0 else alpha * result
    if c is None:
        return result
    return result + (c if beta == 1.0 else beta * c)


def fused_matmul(
    a: Value,
    b: Value,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> Value:
    """FusedMatMul of ONNX Runtime."""
    refuse_unless(not transBatchA and not transBatchB, "FusedMatMul with transBatchA or transBatchB")
    one = a.transpose(-1, -2) if transA else a
    other = b.transpose(-1, -2) if transB else b
    return alpha * (one @ other)


def matmul(a: Value, b: Value) -> Value:
    """MatMul."""
    one, other = tensors(a, b)
    return torch.matmul(one, other)


def einsum(*values: Value, equation: str) -> Value:
    """Einsum."""
    return torch.einsum(equation, *tensors(*values))


REDUCTIONS: dict[str, Callable[..., Value]] = {
    "ReduceSum": reduced(lambda x, axes, keep: torch.sum(x, axes, keepdim=keep, dtype=x.dtype)),
    "ReduceMean": reduced(lambda x, axes, keep: torch.mean(x, axes, keepdim=keep)),
    "ReduceMax": reduced(lambda x, axes, keep: torch.amax(x, axes, keepdim=keep)),
    "ReduceMin": reduced(lambda x, axes, keep: torch.amin(x, axes, keepdim=keep)),
    "ReduceProd": reduce_product,
    "ReduceL1": reduced(lambda x, axes, keep: torch.sum(torch.abs(x), axes, keepdim=keep)),
    "ReduceL2": reduced(lambda x, axes, keep: torch.linalg.vector_norm(x, dim=axes, keepdim=keep)),
    "ReduceSumSquare": reduced(lambda x, axes, keep: torch.sum(x * x, axes, keepdim=keep)),
    "ReduceLogSum": reduced(lambda x, axes, keep: torch.log(torch.sum(x, axes, keepdim=keep))),
    "ReduceLogSumExp": reduced(lambda x, axes, keep: torch.logsumexp(x, axes, keepdim=keep)),
    "ArgMax": largest_place(torch.argmax), "ArgMin": largest_place(torch.argmin), "TopK": top_k,
    "Gemm": gemm, "MatMul": matmul, "Einsum": einsum, "com.microsoft.FusedMatMul": fused_matmul,
}  # fmt: skip
