"""Nodes of a program that compute in half precision: float16 and bfloat16.

ONNX Runtime has no CPU kernels that do. It computes in float32, and rounds elsewhere than eager PyTorch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from torch2ort._torch.dispatch import OpOverload
from torch2ort.program.decomposition_table import Table
from torch2ort.program.kernel_sites import is_operator, operator_name

HALF = frozenset({torch.float16, torch.bfloat16})
_CASTS = frozenset({"_to_copy", "to", "convert_element_type", "detach", "clone"})
# They move numbers or create constants, and round no number that another type represents exactly.
_MOVES = frozenset(
    {
        "_unsafe_view", "alias", "cat", "embedding", "empty", "empty_like", "expand", "extreme", "fill_rows",
        "flatten", "full", "full_like", "gather", "index_select", "new_empty", "new_full", "new_ones",
        "new_zeros", "of_sizes", "ones", "ones_like", "permute", "put_rows", "repeat", "reshape",
        "scalar_tensor", "select", "slice", "split", "split_with_sizes", "squeeze", "stack", "t", "take_rows",
        "transpose", "unbind", "unsqueeze", "view", "where", "zeros", "zeros_like",
    }
)  # fmt: skip
_COMPARISONS = frozenset({"eq", "ge", "gt", "le", "lt", "ne"})
_DECOMPOSED_IN_EAGER = frozenset({"dropout", "flip", "native_dropout"})


def floating_dtypes(node: torch.fx.Node) -> set[torch.dtype]:
    """Return the floating-point types among the arguments and results of ``node``."""
    values: list[object] = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    flat: Iterable[object] = (
        v for value in values for v in (value if isinstance(value, (list, tuple)) else [value])
    )
    return {
        v.dtype
        for v in flat
        if isinstance(v, torch.Tensor) and (v.dtype.is_floating_point or v.dtype.is_complex)
    }


def computes_in_half(node: torch.fx.Node) -> bool:
    """Return True if ``node`` computes in half precision, and does not just convert to or from it."""
    if not is_operator(node) or operator_name(node) in _CASTS:
        return False
    if not isinstance(node.meta.get("val"), (torch.Tensor, list, tuple)):
        return False  # a size
    return not HALF.isdisjoint(floating_dtypes(node))


def rounds_in_half(node: torch.fx.Node) -> bool:
    """Return True if ``node`` computes in half precision, and does not just move numbers either."""
    moves = is_operator(node) and operator_name(node) in _MOVES and len(floating_dtypes(node)) == 1
    return not moves and computes_in_half(node)


def round_compared_numbers(graph: torch.fx.Graph) -> None:
    """Round the numbers that tensors in half precision are compared with to the tensors' own type.

    Eager compares in that type. torch.onnx compares in float32, where 0.1 is no number of bfloat16.

    Args:
        graph: a program's nodes; changed in place.
    """
    for node in graph.nodes:
        if not is_operator(node) or operator_name(node) not in _COMPARISONS:
            continue
        dtype = node.args[0].meta["val"].dtype
        if dtype in HALF and type(node.args[1]) is float:
            node.update_arg(1, torch.tensor(node.args[1], dtype=dtype).item())


def not_decomposed_in_half(table: Table) -> Table:
    """Return decompositions that keep an operator whole where one of its tensors is in half precision.

    Its parts would round separately; a composite is decomposed as in eager. Operators that move numbers, or
    draw them, are decomposed as in ``table``.
    """
    harmless = _MOVES | _DECOMPOSED_IN_EAGER
    return {
        operator: function if _name(operator) in harmless else _unless_half(function)
        for operator, function in table.items()
    }


def _name(operator: OpOverload) -> str:
    return operator._schema.name.removeprefix("aten::")


def _unless_half(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def decompose(*args: Any, **kwargs: Any) -> Any:
        if any(_is_half(value) for value in (*args, *kwargs.values())):
            return NotImplemented
        return function(*args, **kwargs)

    return decompose


def _is_half(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_is_half, value))
    return isinstance(value, torch.Tensor) and value.dtype in HALF
