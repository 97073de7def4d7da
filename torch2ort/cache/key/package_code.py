"""Code of installed packages: identified by version, except for changes that were made while the process ran.

A replaced method or function, an attribute that was set on a class, a function that was added to a table:
each is written next to the name under which the package's code would find it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torch2ort._torch import global_state as private
from torch2ort.cache.key.bytecode_names import uses_of
from torch2ort.cache.key.constant_bytes import atom, words
from torch2ort.cache.key.global_names import resolve
from torch2ort.cache.key.guards import SKIPPED
from torch2ort.cache.key.key_builder import CONSTRUCTORS, ComponentOwner, Unkeyable, Walk, constructor_of
from torch2ort.cache.key.packages import Package, package_of_function, package_of_module

if TYPE_CHECKING:
    from torch2ort.cache.key.functions_and_classes import Definitions

# Packages whose version identifies everything, also the code that their code uses in turn.
OPAQUE = frozenset({"python", "torch2ort", "numpy", "onnx"})
# Wrappers of functions in a class's dictionary in which `functions_in` does not look.
_WRAPPERS = (functools.partial, functools.partialmethod, staticmethod, classmethod, BuiltinFunctionType)
_CALLED_BY_PYTHON = words(
    """__call__ __getattr__ __getattribute__ __setattr__ __getitem__ __len__ __iter__ __bool__ __contains__
    __enter__ __exit__ __eq__ __torch_function__"""
)
# Parts of classes written in C: the only possible change is that one replaces another.
_OF_C: frozenset[type] = frozenset(
    {
        types.MethodDescriptorType,
        types.ClassMethodDescriptorType,
        types.WrapperDescriptorType,
        types.GetSetDescriptorType,
        types.MemberDescriptorType,
    }
)


class Installed:
    """Inspection of the code of installed packages that a model uses.

    Args:
        walk: the walk that receives the components.
        definitions: encoder of the user's functions and classes.
        write_value: writes any other value.

    Attributes:
        classes: the inspected classes of packages.
    """

    def __init__(self, walk: Walk, definitions: Definitions, write_value: Callable[[Any], None]) -> None:
        self._walk = walk
        self._definitions = definitions
        self._value = write_value
        self._users: dict[type, bool] = {}
        self.classes: list[type] = []

    def inspect_class(self, cls: type) -> None:
        """Look for methods and attributes that were set on a class of a package at run time."""
        if not self._walk.once(("inspected with its bases", cls)):
            return
        for base in cls.__mro__:
            package = self._walk.package_of(base)
            if package is None or package.name in OPAQUE or not self._walk.once(("inspected", base)):
                continue
            self.classes.append(base)
            for name, item in list(vars(base).items()):
                if type(item) in _OF_C:
                    if item.__name__ != name:
                        self._walk.atom((name, item.__qualname__))
                elif name not in SKIPPED:
                    self._inspect(base, name, item)

    def guard_classes(self) -> None:
        """Guard the attributes of packages' classes that the walked code reads; call it after the walk."""
        names = self._walk.names | _CALLED_BY_PYTHON | CONSTRUCTORS
        for cls in self.classes:
            place = f"class {cls.__module__}.{cls.__qualname__}"
            if self._walk.any_name:
                self._walk.guards.class_items(cls, place)
            else:
                self._walk.guards.class_entries(cls, names, place)

    def _inspect(self, base: type, name: str, item: Any) -> None:
        # Most items are plain functions.
        functions = [item] if type(item) is FunctionType else list(functions_in(item))
        # A package's code may call its classes anywhere, so a constructor that was set on one counts.
        constructs = name in CONSTRUCTORS
        for function in map(_without_tagging, functions):
            package = package_of_function(function)
            if package is None:
                self._walk.atom(f"{base.__qualname__}.{name}")
                self._definitions.function(function, None if constructs else name)
                continue
            if (
                function.__qualname__ != f"{base.__qualname__}.{name}"
                or function.__module__ != base.__module__
            ):
                self._walk.atom((name, _name(function)))
            via = None if _is_called_by_python(base, name) else constructor_of(base) if constructs else name
            self.follow(package, function, via)
        if functions:
            return
        data = atom(item)
        if data is not None:
            self._walk.atom(name)
            self._walk.write(data)
        elif isinstance(item, (*_WRAPPERS, torch.Tensor, np.ndarray)) or self._is_users(item):
            self._walk.attribute(name, functools.partial(self._value, item))

    def _is_users(self, value: Any) -> bool:
        """Return True if the class of ``value`` is the user's own."""
        kind = type(value)
        known = self._users.get(kind)
        if known is None:
            known = self._users[kind] = package_of_module(kind.__module__) is None
        return known

    def follow(self, package: Package, function: FunctionType, via: str | None) -> None:
        """Add a package's function to the walk, which inspects it once it counts."""
        if package.name in OPAQUE or (package.name == "torch" and not _is_layer_code(function)):
            return
        self._walk.refer(
            f"uses of {_name(function)}",
            ("uses", id(function)),
            lambda: self._look_through(function),
            own=False,
            via=via,
            owner=ComponentOwner.TORCH if package.name == "torch" else ComponentOwner.MODEL,
        )

    def _look_through(self, function: FunctionType) -> None:
        uses = uses_of(function.__code__)
        self._walk.reads(uses.names)
        for values in (function.__defaults__, tuple((function.__kwdefaults__ or {}).items())):
            data = atom(values)
            if values and data is not None:
                self._walk.write(data)
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:
                continue  # not assigned yet
            if isinstance(value, (FunctionType, BuiltinFunctionType)):
                self._write_used(("closure",), value)
        for chain in uses.chains:
            try:
                value, used = resolve(chain, function.__globals__, self._walk.guards)
            except Unkeyable:
                continue  # a package's own operators are fixed by its version
            if value is type and not (function.__module__ or "").startswith("torch."):
                self._walk.asks_types = True
            if not isinstance(value, ModuleType) and used:
                self._write_used(chain[:used], value)

    def _write_used(self, chain: tuple[str, ...], value: Any) -> None:
        """Write the value that a package's code finds under a global name."""
        walk = self._walk
        if isinstance(value, FunctionType):
            package = package_of_function(value)
            walk.atom((*chain, _name(value)))
            if package is not None:
                self.follow(package, value, None)
            else:
                self._definitions.function(value)
        elif isinstance(value, BuiltinFunctionType):
            walk.atom((*chain, _name(value)))
        elif isinstance(value, type):
            self._write_used_class(chain, value)
        elif atom(value) is not None:
            walk.atom((*chain, value))
        elif isinstance(value, functools.partial) or self._is_users(value):
            walk.atom(chain)
            walk.attempt(functools.partial(self._value, value))
        else:
            self._table(chain, value)

    def _write_used_class(self, chain: tuple[str, ...], cls: type) -> None:
        if self._walk.package_of(cls) is None:
            self._walk.atom(chain)
            self._definitions.class_(cls, used_as_value=True)
            return
        if cls.__name__ != chain[-1]:
            self._walk.atom((*chain, f"{cls.__module__}.{cls.__qualname__}"))
        if issubclass(cls, torch.autograd.Function):
            self._definitions.note_function(cls)
        else:
            self.inspect_class(cls)

    def _table(self, chain: tuple[str, ...], value: Any) -> None:
        """Write a package's table of functions, to which the user may have added some."""
        for table in _tables(value):
            self._walk.atom(chain)
            for key, item in table.items():
                self._walk.attempt(functools.partial(self._value, (key, item)))


def functions_in(item: Any) -> Iterator[FunctionType]:
    """Yield the Python functions behind an entry of a class's dictionary."""
    if isinstance(item, FunctionType):
        yield item
    elif isinstance(item, (staticmethod, classmethod)):
        yield from functions_in(item.__func__)
    elif isinstance(item, property):
        for part in (item.fget, item.fset, item.fdel):
            yield from functions_in(part)
    elif isinstance(item, functools.cached_property):
        yield from functions_in(item.func)


def _name(function: FunctionType | BuiltinFunctionType) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _is_called_by_python(cls: type, name: str) -> bool:
    """Return True if a method runs although no code reads its name; in torch, only ``__call__`` counts."""
    if (cls.__module__ or "").startswith("torch."):
        return name == "__call__" and cls is not torch.nn.Module  # whose tables of hooks are guarded
    return name in _CALLED_BY_PYTHON


def _is_layer_code(function: FunctionType) -> bool:
    module = function.__module__ or ""
    return module.startswith(("torch.nn.modules.", "torch.nn.functional", "torch.nn.utils.", "torch.ao."))


def _tables(value: Any) -> Iterator[dict[Any, Any]]:
    """Yield dictionaries that contain functions or classes: ``value``, or attributes of it or its class."""
    if isinstance(value, dict):
        holders = [{"": value}]
    else:
        holders = [
            vars(h) for h in (value, *type(value).__mro__) if hasattr(h, "__dict__") and h is not object
        ]
    for holder in holders:
        for item in list(holder.values()):
            if isinstance(item, dict) and any(isinstance(v, (FunctionType, type)) for v in item.values()):
                yield item


def _without_tagging(function: FunctionType) -> FunctionType:
    """Return the function that dynamo's wrapper calls, or the function itself."""
    while function.__module__ == private.TAGGING:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        inner = next((cell for cell in cells if isinstance(cell, FunctionType)), None)
        if inner is None:
            break
        function = inner
    return function
