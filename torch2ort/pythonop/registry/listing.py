"""Listing of all registrations, over all tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch2ort.errors import RegistryError
from torch2ort.pythonop.registry._table import LOCK, FunctionClass, Table, did_you_mean, key_of, nearest
from torch2ort.pythonop.registry.exporters import Exporter, exporters
from torch2ort.pythonop.registry.functions import functions
from torch2ort.pythonop.registry.inferers import Inferer, inferers
from torch2ort.pythonop.registry.inline import inlined
from torch2ort.pythonop.registry.inplace import InplaceMap, inplace_maps
from torch2ort.pythonop.registry.operators import gradients, symbolics

_TABLES: tuple[Table[Any], ...] = (
    exporters,
    inferers,
    inplace_maps,
    inlined,
    functions,
    symbolics,
    gradients,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """All registrations under one name; ``None`` for those that do not exist.

    Attributes:
        name: qualified name of a Function, or name of an operator.
        exporter: see :func:`torch2ort.register_exporter`.
        shape_inferer: see :func:`torch2ort.register_shape_inferer`.
        inplace_map: see :func:`torch2ort.register_inplace_map`.
        inline: True if the Function is inlined, see :func:`torch2ort.register_inline`.
        function: see :func:`torch2ort.register_function`.
        symbolic: see :func:`torch2ort.register_symbolic`.
        gradient: see :func:`torch2ort.register_gradient`.
    """

    name: str
    exporter: Exporter | None = None
    shape_inferer: Inferer | None = None
    inplace_map: InplaceMap | None = None
    inline: bool = False
    function: FunctionClass | None = None
    symbolic: Callable[..., Any] | None = None
    gradient: Callable[..., Any] | None = None


def registered() -> dict[str, Registration]:
    """Return all current registrations by name, including built-in ones.

    >>> import torch2ort
    >>> _ = torch2ort.register_shape_inferer("mylib.Gelu", lambda node, shapes, dtypes: (shapes, dtypes))
    >>> torch2ort.registered()["mylib.Gelu"].exporter is None
    True
    >>> torch2ort.unregister("mylib.Gelu")
    >>> "mylib.Gelu" in torch2ort.registered()
    False
    """
    kinds = ("exporter", "shape_inferer", "inplace_map", "inline", "function", "symbolic", "gradient")
    found: dict[str, dict[str, Any]] = {}
    with LOCK:
        for kind, table in zip(kinds, _TABLES, strict=True):
            for name, entry in table.entries().items():
                found.setdefault(name, {})[kind] = entry.value
    return {name: Registration(name=name, **found[name]) for name in sorted(found)}


def unregister(function: str | FunctionClass) -> None:
    """Remove every entry of a Function, or of an operator.

    Args:
        function: the qualified name, the class, or the operator's name.

    Raises:
        RegistryError: there is no entry of that name.
    """
    name = function if isinstance(function, str) else key_of(function, "unregister")[0]
    with LOCK:
        if any([table.remove(name) for table in _TABLES]):
            return
    raise RegistryError(
        f"unregister: '{name}' has no entry{did_you_mean(nearest(name, registered()))}; "
        f"torch2ort.registered() lists them all"
    )
