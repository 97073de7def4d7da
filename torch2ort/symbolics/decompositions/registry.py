"""Tables of decompositions, filled by the modules that have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from torch2ort.symbolics._torch_private import OpOverload

Decomposition: TypeAlias = Callable[..., Any]
Table: TypeAlias = dict[OpOverload, Decomposition]
_F = TypeVar("_F", bound=Decomposition)

# Those of every graph.
EVERY: Table = {}
# Those of a graph that onnxruntime-training differentiates, which go before the others.
FOR_GRADIENTS: Table = {}


def decomposes(*operators: OpOverload, only_for_gradients: bool = True) -> Callable[[_F], _F]:
    """Register a function as the decomposition of ``operators``.

    Args:
        operators: overloads whose arguments the function takes.
        only_for_gradients: whether ONNX has an operator of its own that does for inference.
    """

    def register(function: _F) -> _F:
        table = FOR_GRADIENTS if only_for_gradients else EVERY
        table.update(dict.fromkeys(operators, function))
        return function

    return register
