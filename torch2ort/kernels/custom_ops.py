"""Operators of libraries, and the properties of them that a graph does not support."""

from __future__ import annotations

from typing import Any

from torch2ort._torch.dispatch import OpOverload, schema_of
from torch2ort.kernels.functions import LIBRARY_OPERATORS

# Namespaces of torch, whose operators torch2ort supports by name or not at all.
_OF_TORCH = frozenset(
    (
        "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "_quantized", "aten", "c10d",
        "c10d_functional", "cuda", "debugprims", "export", "fsdp", "higher_order", "inductor",
        "inductor_prims", "mkl", "mkldnn", "mkldnn_prepacked", "onednn", "onnx", "onnx_symbolic",
        "prepacked", "prim", "prims", "profiler", "quantized", "quantized_decomposed", "rngprims", "sparse",
        "static_runtime", "streams", "symm_mem", "torch2ort", "xnnpack",
    )
)  # fmt: skip
_RESULTS = frozenset({"Tensor", "List[Tensor]"})


def is_foreign(operator: Any) -> bool:
    """Return True if ``operator`` is an overload that was registered by another library than torch."""
    return isinstance(operator, OpOverload) and operator.namespace not in _OF_TORCH


def is_of_library(operator: Any) -> bool:
    """Return True if ``operator`` is such an overload, and a file may not name it."""
    return is_foreign(operator) and operator.name() not in LIBRARY_OPERATORS


def unfit(operator: OpOverload) -> str | None:
    """Return what a graph does not support about an operator, and the remedy; ``None`` if it supports it."""
    schema = schema_of(operator)
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if written:
        return (
            f"writes to {' and '.join(map(repr, written))}, and a graph has no memory that an operator may "
            f"write to. Register one that returns the new value (mutates_args=()), and copy that to where it "
            f"belongs"
        )
    if any(value.alias_info is not None for value in (*schema.arguments, *schema.returns)):
        return (
            "returns a view of an argument, and each value of a graph has memory of its own. Register one "
            "without the alias in its schema, which returns a copy"
        )
    returned = [str(value.type) for value in schema.returns]
    if returned != ["List[Tensor]"] and set(returned) != {"Tensor"}:
        what = returned[0] if len(returned) == 1 else f"({', '.join(returned)})"
        return (
            f"returns {what}, and a graph takes tensors, or one list of tensors. Register one that returns "
            f"only tensors, with numbers as tensors without dimensions"
        )
    return None
