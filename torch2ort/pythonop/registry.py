"""Classes that were made known by name, so that a loaded file can call them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar, overload

import torch

from torch2ort.errors import FunctionNotFoundError, RegistryError
from torch2ort.pythonop.site import qualified_name

FunctionType = TypeVar("FunctionType", bound=type[torch.autograd.Function])


class FunctionRegistry:
    """Thread-safe map from qualified names to Function classes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._classes: dict[str, type[torch.autograd.Function]] = {}

    def add(self, function: type[torch.autograd.Function], name: str, *, override: bool) -> None:
        """Register ``function`` under ``name``; see :func:`register_function`."""
        with self._lock:
            known = self._classes.get(name)
            if known is not None and known is not function and not override:
                raise RegistryError(
                    f"register_function: the name '{name}' already stands for {known!r}, given was "
                    f"{function!r}; "
                    f"choose another name, or pass override=True"
                )
            self._classes[name] = function

    def remove(self, name: str) -> bool:
        """Forget ``name``; returns whether it was known."""
        with self._lock:
            return self._classes.pop(name, None) is not None

    def get(self, name: str) -> type[torch.autograd.Function] | None:
        """The class of that name, or ``None``."""
        with self._lock:
            return self._classes.get(name)


functions = FunctionRegistry()


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
        cls: a subclass of ``torch.autograd.Function``. Left out, the call gives a decorator.
        name: the name that files use; the qualified name by default.
        override: whether to replace a class that already has the name.

    Returns:
        ``cls`` itself, so that it serves as a decorator.

    Raises:
        RegistryError: ``cls`` is no Function, or the name already stands for another class.
    """
    if cls is None:
        return lambda function: register_function(function, name, override=override)
    if not (isinstance(cls, type) and issubclass(cls, torch.autograd.Function)):
        raise RegistryError(
            f"register_function: expected a subclass of torch.autograd.Function, got {cls!r}; pass the "
            f"class itself, not its apply"
        )
    functions.add(cls, name or qualified_name(cls), override=override)
    return cls


def resolve(
    names: Iterable[str], given: Iterable[type[torch.autograd.Function]]
) -> dict[str, type[torch.autograd.Function]]:
    """Classes for the names of a file.

    Only ``given`` classes and registered ones count: nothing is imported.

    Args:
        names: the ``func_name`` of each site. ``name#2`` stands for the second class of that name.
        given: classes in the order of their numbers.

    Raises:
        FunctionNotFoundError: some names are in neither; lists all of them.
    """
    supplied: dict[str, type[torch.autograd.Function]] = {}
    for function in given:
        name, number = qualified_name(function), 1
        while (key := name if number == 1 else f"{name}#{number}") in supplied:
            number += 1
        supplied[key] = function
    found: dict[str, type[torch.autograd.Function]] = {}
    missing: list[str] = []
    for name in dict.fromkeys(names):
        function = supplied.get(name) or functions.get(name)
        if function is None:
            missing.append(name)
        else:
            found[name] = function
    if missing:
        raise FunctionNotFoundError(
            f"the model calls {len(missing)} Function(s) that were not supplied: {', '.join(missing)}. "
            f"Pass the classes to torch2ort.load(path, functions=[...]) or register them with "
            f"torch2ort.register_function"
        )
    return found
