"""Tables of decompositions, filled by the modules that have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from torch2ort._torch.dispatch import OpOverload

Decomposition: TypeAlias = Callable[..., Any]
Table: TypeAlias = dict[OpOverload, Decomposition]
_F = TypeVar("_F", bound=Decomposition)

# Those of every graph.
EVERY: Table = {}
# Those of graphs that are exported besides, in front of the others.
EXPORTED: Table = {}


def decomposes(*operators: OpOverload, table: Table = EVERY) -> Callable[[_F], _F]:
    """Register a function as the decomposition of ``operators``.

    Args:
        operators: overloads whose arguments the function takes.
        table: where; an engine has a table of its own.
    """

    def register(function: _F) -> _F:
        table.update(dict.fromkeys(operators, function))
        return function

    return register
