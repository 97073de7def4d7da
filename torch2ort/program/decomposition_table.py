"""Tables of decompositions, filled by the modules that define them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from torch2ort._torch.dispatch import OpOverload

Decomposition: TypeAlias = Callable[..., Any]
Table: TypeAlias = dict[OpOverload, Decomposition]
_F = TypeVar("_F", bound=Decomposition)

# Decompositions of every graph.
EVERY: Table = {}
# Additional decompositions of exported graphs, which take precedence.
EXPORTED: Table = {}


def decomposes(*operators: OpOverload, table: Table = EVERY) -> Callable[[_F], _F]:
    """Register a function as the decomposition of ``operators``.

    Args:
        operators: overloads whose arguments the function accepts.
        table: the table to add it to; an engine has a table of its own.
    """

    def register(function: _F) -> _F:
        table.update(dict.fromkeys(operators, function))
        return function

    return register
