"""Locations of Functions, by which a stored graph finds their classes in another process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch2ort.cache.key.key import Key
from torch2ort.cache.key.key_builder import Unkeyable
from torch2ort.cache.key.packages import by_name, package_of_class

_WALKED, _INSTALLED = "found in the model's code", "found in an installed package"


def locate_function(function: type[torch.autograd.Function], key: Key) -> list[str | int]:
    """Return a Function's location in a form that :func:`located_function` reads in another process.

    Args:
        function: the class that a site calls.
        key: the model's key, whose walk read the model's code.

    Raises:
        Unkeyable: the walk did not find the class, and no installed package contains it.
    """
    name = f"{function.__module__}.{function.__qualname__}"
    classes = key.functions.get(name, ())
    if function in classes:
        return [_WALKED, name, list(classes).index(function)]
    if package_of_class(function) is not None:
        return [_INSTALLED, function.__module__, function.__qualname__]
    raise Unkeyable(
        f"{name} is called, but it is not found from the model's code and attributes; define it at the top "
        f"of a module, or make it an attribute of the model"
    )


def located_function(place: Sequence[Any], key: Key) -> type[torch.autograd.Function]:
    """Return the class that :func:`locate_function` located.

    Raises:
        Unkeyable: the class does not exist here, because its module is not imported.
    """
    kind, first, second = place
    if kind == _WALKED:
        return key.functions[first][int(second)]
    found = by_name(first, second)
    if isinstance(found, type) and issubclass(found, torch.autograd.Function) and package_of_class(found):
        installed: type[torch.autograd.Function] = found
        return installed
    raise Unkeyable(f"{first}.{second} is not imported here")
