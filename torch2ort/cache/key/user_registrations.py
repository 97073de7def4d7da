"""Users' registrations that can change a model's graph."""

from __future__ import annotations

import functools
from typing import Any

import optree

from torch2ort.cache.key.key_builder import ComponentOwner, Walk
from torch2ort.cache.key.object_encoder import ObjectEncoder
from torch2ort.cache.key.packages import package_of_class
from torch2ort.io_schema._containers import NAMESPACE
from torch2ort.pythonop.registry._table import Table
from torch2ort.pythonop.registry.exporters import exporters
from torch2ort.pythonop.registry.inferers import inferers
from torch2ort.pythonop.registry.inline import inlined
from torch2ort.pythonop.registry.inplace import inplace_maps
from torch2ort.pythonop.registry.operators import gradients, symbolics

_OF_FUNCTIONS: tuple[Table[object], ...] = (exporters, inferers, inplace_maps, inlined)  # type: ignore[assignment]
_OF_OPERATORS: tuple[Table[object], ...] = (symbolics, gradients)  # type: ignore[assignment]


def walk_registrations(walk: Walk, values: ObjectEncoder) -> None:
    """Write the registrations that apply to the Functions that the walk found, and to operators.

    Raises:
        Unkeyable: a registered callable uses something that cannot be compared between processes.
    """
    walk.refer("registered for operators", "operators", lambda: _write_operators(values))
    containers = functools.partial(_write_containers, values)
    walk.refer("classes registered with optree", "optree", containers, owner=ComponentOwner.CONTAINERS)
    known: set[type] = set()
    while True:
        walk.run()  # may find Functions, whose registrations may lead to others
        found = [(name, cls) for name, classes in walk.functions.items() for cls in classes]
        if known.issuperset(cls for _, cls in found):
            return
        for name, cls in found:
            if cls not in known:
                known.add(cls)
                fill = functools.partial(_write_entries, values, name, cls)
                walk.refer(f"registered for {name}", ("registered", cls), fill)


def _write_entries(values: ObjectEncoder, name: str, cls: type) -> None:
    for table in _OF_FUNCTIONS:
        entry = table.entries().get(name)
        in_force = entry is not None and entry.function in (None, cls)
        values.write(entry.value if entry is not None and in_force else None)


def _write_containers(values: ObjectEncoder) -> None:
    """Write the user's functions that flatten and unflatten classes registered with optree."""
    registry: Any = optree.register_pytree_node  # returns all classes, although its annotations name one
    for cls, entry in registry.get(namespace=NAMESPACE).items():
        if entry.kind == optree.PyTreeKind.CUSTOM and not _is_own(cls):
            values.write((cls, entry.flatten_func, entry.unflatten_func))


def _is_own(cls: type) -> bool:
    package = package_of_class(cls)
    return package is not None and package.name in ("optree", "torch2ort")


def _write_operators(values: ObjectEncoder) -> None:
    for table in _OF_OPERATORS:
        entries = table.entries()
        values.write([(name, entries[name].value) for name in sorted(entries)])
