"""Resolution of the names in code: global variables, modules, their attributes."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final

import torch

from torch2ort.cache.key.constant_bytes import words
from torch2ort.cache.key.guards import GuardList
from torch2ort.cache.key.key_builder import Unkeyable
from torch2ort.cache.key.library_operators import check_namespace, is_of_torch
from torch2ort.cache.key.packages import Package

MISSING: Final = object()

# Modules of the standard library whose functions depend on their arguments alone.
_PURE = words(
    """_abc _bisect _collections _collections_abc _decimal _functools _hashlib _heapq _operator _pydecimal
    _string _struct _warnings _weakref _weakrefset abc array base64 binascii bisect builtins cmath collections
    collections.abc contextlib copy copyreg dataclasses decimal enum fractions functools hashlib heapq
    itertools json json.decoder json.encoder keyword logging math numbers operator re re._compiler re._parser
    reprlib statistics string struct textwrap types typing typing_extensions unicodedata warnings weakref
    zlib"""
)
_IMPURE_BUILTINS = words("__import__ breakpoint compile eval exec globals hash id input locals open")
_IMPURE_TORCH = words(
    "torch.random torch.serialization torch.hub torch.get_num_threads torch.get_num_interop_threads"
)


def resolve(
    chain: tuple[str, ...], variables: Mapping[str, Any], guards: GuardList | None = None
) -> tuple[Any, int]:
    """Follow ``a.b.c`` through modules, as far as they go.

    Args:
        chain: a global name and the attributes read from it.
        variables: the globals of the code.
        guards: list to which a guard for each variable on the way is added.

    Returns:
        The value, or :data:`MISSING`, and the number of names of ``chain`` that lead to it.

    Raises:
        Unkeyable: the name is a namespace of ``torch.ops`` with operators outside of torch, or the table of
            all modules.
    """
    value = variables.get(chain[0], MISSING)
    if guards is not None:
        guards.entry(variables, chain[0], f"global {variables.get('__name__')}.{chain[0]}")
    if value is MISSING:
        if guards is not None:
            guards.entry(vars(builtins), chain[0], f"builtin {chain[0]}")
        value = vars(builtins).get(chain[0], MISSING)
    used = 1
    while isinstance(value, ModuleType) and used < len(chain):
        if is_operator_namespace(value):
            return _operator(value, chain, used)
        inner = vars(value).get(chain[used], MISSING)
        if guards is not None:
            guards.entry(vars(value), chain[used], f"{value.__name__}.{chain[used]}")
        if inner is MISSING:
            inner = sys.modules.get(f"{value.__name__}.{chain[used]}", MISSING)
        if inner is MISSING:
            break
        value, used = inner, used + 1
    if value is sys.modules:
        raise Unkeyable("sys.modules holds every module of the process")
    return value, used


def _operator(namespace: ModuleType, chain: tuple[str, ...], used: int) -> tuple[Any, int]:
    """Return the value of the rest of ``chain`` in ``torch.ops`` or one of its namespaces."""
    if namespace is torch.ops:
        if is_of_torch(chain[used]):
            return namespace, len(chain)
        namespace, used = getattr(torch.ops, chain[used]), used + 1
    name = namespace.__name__.rpartition(".")[2]
    if is_of_torch(name):
        return namespace, len(chain)
    if used == len(chain):
        check_namespace(name)
    return getattr(namespace, chain[used], MISSING), used + 1


def is_operator_namespace(module: ModuleType) -> bool:
    """Return True if a module is ``torch.ops`` or one of its namespaces."""
    return module is torch.ops or type(module) is type(torch.ops.aten)


def check_pure(package: Package, value: FunctionType | BuiltinFunctionType | type) -> None:
    """Raise :class:`Unkeyable` for code of Python or torch whose results depend on more than arguments."""
    # A wrapper has the name of the function that it wraps, which another module defines.
    own = value.__globals__.get("__name__") if isinstance(value, FunctionType) else value.__module__
    module = own or "builtins"
    name = value.__qualname__ if module == "builtins" else f"{module}.{value.__qualname__}"
    if package.name == "python":
        impure = module not in _PURE or (module == "builtins" and value.__name__ in _IMPURE_BUILTINS)
    else:
        impure = package.name == "torch" and (module in _IMPURE_TORCH or name in _IMPURE_TORCH)
    if impure:
        raise Unkeyable(f"{name} may give another result in each process")


def check_pure_module(package: Package, name: str) -> None:
    """Raise :class:`Unkeyable` for a module of Python or torch that contains such functions."""
    if (package.name == "python" and name not in _PURE) or name in _IMPURE_TORCH:
        raise Unkeyable(f"functions of the module {name} may give other results in each process")


def topic_of(module: str) -> str | None:
    """Return the topic that users of a module of torch depend on: ``"ranks"``, ``"devices"``, or ``None``."""
    if module.startswith("torch.distributed"):
        return "ranks"
    return "devices" if module in ("torch.cuda", "torch.xpu", "torch.mps", "torch.accelerator") else None


def holds(module: ModuleType, name: str) -> bool:
    """Return True if a module currently has an attribute or a submodule of that name."""
    return name in vars(module) or f"{module.__name__}.{name}" in sys.modules


def public_items(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield everything that a module defines, except for the attributes of the import system."""
    for name, value in vars(module).items():
        if not (name.startswith("__") and name.endswith("__")) or name == "__getattr__":
            yield name, value
