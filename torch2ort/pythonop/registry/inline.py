"""Functions whose operators become part of the graph."""

from __future__ import annotations

from typing import TypeVar, overload

from torch2ort.pythonop.registry._table import FunctionClass, Table, key_of

_C = TypeVar("_C", bound=FunctionClass)

inlined: Table[bool] = Table("register_inline", "an entry")


@overload
def register_inline(function: str, *, override: bool = False) -> None: ...
@overload
def register_inline(function: _C, *, override: bool = False) -> _C: ...
def register_inline(function: str | _C, *, override: bool = False) -> _C | None:
    """Have a Function's operators as a part of the graph, in the place of opaque calls.

    Training traces forward and the Function's own ``backward``, which need not be the derivative of forward,
    and puts both into its graphs. An export, and an :class:`ORTModule` if nobody asks for gradients, hold the
    operators of forward, unless an exporter is registered besides. Only what torch's operators compute is
    traced: code of numpy, prints and branches on values have no place in a graph.

    Args:
        function: its qualified name, or the class, so that it serves as a decorator.
        override: whether to replace an entry of the same name.

    Returns:
        The class, if it was given.

    Raises:
        RegistryError: ``function`` is no Function, or the name is registered already.

    A Function that cannot be inlined raises :class:`torch2ort.ExportError` with the reason, in the export or
    the first step.
    """
    name, cls = key_of(function, inlined.verb)
    inlined.add(name, cls, True, override=override)
    return None if isinstance(function, str) else function
