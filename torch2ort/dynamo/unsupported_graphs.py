"""Errors for nodes of a graph that no session runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torch2ort._torch.dynamo import HigherOrderOperator, OpOverload, numpys_draw
from torch2ort.errors import UnsupportedOperatorError
from torch2ort.sizes.symbols import has_hint
from torch2ort.support.provenance import source_line

_OUT = "Exclude that part from the compiled code, with torch.compiler.disable"


def refuse(graph: torch.fx.Graph) -> None:
    """Raise an error for a node of AOTAutograd's graph that no session runs as eager PyTorch does.

    Raises:
        UnsupportedOperatorError: there is such a node; the error names its operator and line.
    """
    for node in graph.nodes:
        for value in _values(node):
            what = _odd(value)
            if what is not None:
                raise UnsupportedOperatorError(
                    f"{_name(node)} {what}, which torch2ort's graphs do not support. {_OUT}"
                )
        if node.op == "call_module" or node.op == "call_method":
            raise UnsupportedOperatorError(f"{_name(node)} is no operator of PyTorch. {_OUT}")
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            _refuse_silent(node)
        elif isinstance(node.target, HigherOrderOperator):
            raise UnsupportedOperatorError(
                f"{_name(node)} is an operator that takes functions, and a session runs none. {_OUT}"
            )


def refuse_numpys_draws(graph: torch.fx.Graph) -> None:
    """Raise an error for NumPy's random functions, which draw from PyTorch's generator in dynamo's graphs.

    Args:
        graph: dynamo's graph.

    Raises:
        UnsupportedOperatorError: there is a function of ``numpy.random``; the error names it and its line.
    """
    for node in graph.nodes:
        function = numpys_draw(node)
        if function is not None:
            raise UnsupportedOperatorError(
                f"{function} at {source_line(node)} would draw from PyTorch's generator, or seed that, and "
                f"not NumPy's. Set torch._dynamo.config.use_numpy_random_stream = True: then NumPy draws, "
                f"outside of the graphs"
            )


def _refuse_silent(node: torch.fx.Node) -> None:
    """Raise an error for an operator that writes to a tensor, or returns nothing."""
    schema = node.target._schema  # type: ignore[union-attr]
    if schema.is_mutable:
        raise UnsupportedOperatorError(
            f"{_name(node)} writes to a tensor in a way that PyTorch does not make functional. {_OUT}"
        )
    if not schema.returns:
        raise UnsupportedOperatorError(
            f"{_name(node)} returns nothing and raises an error for some values; a session would drop it. "
            f"{_OUT}"
        )


def _values(node: torch.fx.Node) -> Iterator[Any]:
    value = node.meta.get("val")
    yield from value if isinstance(value, (list, tuple)) else (value,)


def _odd(value: Any) -> str | None:
    if isinstance(value, torch.Tensor):
        if not all(map(has_hint, value.shape)):
            return "has a data-dependent size"
        if value.device.type != "cpu":
            return f"is on {value.device}"
        if value.is_complex() or value.layout is not torch.strided or value.is_quantized:
            return "returns complex, sparse or quantized numbers"
        return None
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and not has_hint(value):
        return "reads a number out of a tensor"
    return None


def _name(node: torch.fx.Node) -> str:
    if node.op == "placeholder":
        return f"an argument of the compiled code ({node.name})"
    return f"{node.target} at {source_line(node)}"
