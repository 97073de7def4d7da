"""Removal of a trace's proxies, of modules with two names, from arguments of Functions.

The proxies are valid only during the trace, and a site's arguments outlive it.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from torch2ort._torch import autograd_functions as private


def without_proxies(value: Any) -> Any:
    """Return ``value`` with the modules themselves; the very same object if it contains no proxy."""
    kind = type(value)
    if kind in (list, tuple):
        items = [without_proxies(item) for item in value]
        return kind(items) if _differ(items, value) else value
    if kind is dict:
        made = {key: without_proxies(item) for key, item in value.items()}
        return made if _differ(made.values(), value.values()) else value
    if kind is functools.partial:
        parts = (value.func, value.args, value.keywords)
        function, args, kwargs = map(without_proxies, parts)
        return (
            functools.partial(function, *args, **kwargs)
            if _differ((function, args, kwargs), parts)
            else value
        )
    if kind is types.MethodType:
        held = without_proxies(value.__self__)
        return value if held is value.__self__ else types.MethodType(value.__func__, held)
    if kind is types.FunctionType:
        for cell in value.__closure__ or ():
            _replace_in(cell)
    return private.own_module(value)


def _differ(made: Any, given: Any) -> bool:
    return any(one is not other for one, other in zip(made, given, strict=True))


def _replace_in(cell: types.CellType) -> None:
    """Set a closure's variable to the module itself, as in eager PyTorch."""
    try:
        held = cell.cell_contents
    except ValueError:
        return
    own = held if isinstance(held, types.FunctionType) else without_proxies(held)
    if own is not held:
        cell.cell_contents = own
