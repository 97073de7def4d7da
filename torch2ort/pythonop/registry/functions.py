"""Classes registered by name, so that a loaded file can call them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar, overload

import torch

from torch2ort.errors import FunctionNotFoundError, RegistryError
from torch2ort.pythonop.registry._table import FunctionClass, Table
from torch2ort.pythonop.site import qualified_name

FunctionType = TypeVar("FunctionType", bound=FunctionClass)

functions: Table[FunctionClass] = Table("register_function", "a class")


@overload
def register_function(
    cls: FunctionType, name: str | None = None, *, override: bool = False
) -> FunctionType: ...
@overload
def register_function(
    cls: None = None, name: str | None = None, *, override: bool = False
) -> Callable[[FunctionType], FunctionType]: ...
def register_function(
    cls: FunctionType | None = None, name: str | None = None, *, override: bool = False
) -> FunctionType | Callable[[FunctionType], FunctionType]:
    """Make a Function resolvable by name for :func:`torch2ort.load`.

    Args:
        cls: a subclass of ``torch.autograd.Function``. If it is omitted, a decorator is returned.
        name: the name that files use; the qualified name by default.
        override: whether to replace a class that already has the name.

    Returns:
        ``cls`` itself, so that the function serves as a decorator.

    Raises:
        RegistryError: ``cls`` is not a Function, or the name is already registered for a class.
    """
    if cls is None:
        return lambda function: register_function(function, name, override=override)
    if not _is_function(cls):
        raise RegistryError(
            f"register_function: expected a subclass of torch.autograd.Function, got {cls!r}; pass the "
            f"class itself, not its apply"
        )
    functions.add(name or qualified_name(cls), cls, cls, override=override)
    return cls


def classes_given(given: object) -> tuple[FunctionClass, ...]:
    """Return the classes that a caller passes with a file.

    Raises:
        RegistryError: ``given`` is not a list of classes.
    """
    classes = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else given
    if isinstance(classes, tuple) and all(map(_is_function, classes)):
        return classes
    raise RegistryError(
        f"functions={given!r}: expected a list of subclasses of torch.autograd.Function; pass the classes "
        f"themselves, as in functions=[MyFunction]"
    )


def _is_function(cls: object) -> bool:
    return isinstance(cls, type) and issubclass(cls, torch.autograd.Function)


def resolve(names: Iterable[str], given: Iterable[FunctionClass]) -> dict[str, FunctionClass]:
    """Return the classes for the names of a file.

    Only ``given`` classes and registered ones count: nothing is imported.

    Args:
        names: the ``func_name`` of each site. ``name#2`` is the second class of that name.
        given: classes in the order of their numbers.

    Raises:
        FunctionNotFoundError: some names are neither given nor registered; the message lists all of them.
        RegistryError: ``given`` contains something else than classes.
    """
    supplied: dict[str, FunctionClass] = {}
    for function in classes_given(given):
        name, number = qualified_name(function), 1
        while (key := name if number == 1 else f"{name}#{number}") in supplied:
            number += 1
        supplied[key] = function
    found: dict[str, FunctionClass] = {}
    missing: list[str] = []
    for name in dict.fromkeys(names):
        entry = functions.find(name)
        if name in supplied:
            found[name] = supplied[name]
        elif entry is not None:
            found[name] = entry.value
        else:
            missing.append(name)
    if missing:
        raise FunctionNotFoundError(
            f"the model calls {len(missing)} Function(s) that were not supplied: {', '.join(missing)}. "
            f"Pass the classes to torch2ort.load(path, functions=[...]) or register them with "
            f"torch2ort.register_function"
        )
    return found
