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
    """Make a Function's operators part of the graph, instead of opaque calls.

    Training traces forward and the Function's own ``backward``, which need not be the derivative of forward,
    and puts both into its graphs. An export, and an :class:`ORTModule` whose caller needs no gradients,
    contain the operators of forward, unless an exporter is registered besides. Only torch's operators are
    traced: a graph cannot contain NumPy code, prints and branches on values.

    Args:
        function: its qualified name, or the class, so that the function serves as a decorator.
        override: whether to replace an entry of the same name.

    Returns:
        The class, if it was given.

    Raises:
        RegistryError: ``function`` is not a Function, or the name is registered already.

    A Function that cannot be inlined raises :class:`torch2ort.ExportError` with the reason, in the export or
    the first step.
    """
    name, cls = key_of(function, inlined.verb)
    inlined.add(name, cls, True, override=override)
    return None if isinstance(function, str) else function
