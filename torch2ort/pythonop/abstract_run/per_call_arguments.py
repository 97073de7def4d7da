"""Arguments that the model's forward creates in each call: ``apply(x, {"n": 1})``.

A graph has one object for such an argument. If forward may write to it, each call gets a copy of it.
"""

from __future__ import annotations

import collections
import copy
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from torch2ort.errors import ExportError
from torch2ort.pythonop.abstract_run.object_rollback import FunctionWrites
from torch2ort.pythonop.abstract_run.opaque_objects import steps_unseen
from torch2ort.pythonop.site import TENSOR, Site

_CONTAINERS = (list, dict, set, bytearray)
_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)


def find_per_call_arguments(sites: Iterable[Site], function_writes: FunctionWrites) -> None:
    """Fill :attr:`Site.fresh`, ``shared``, ``keeps_state`` and ``remembers``.

    It must be called when only the model holds references to its objects.

    Args:
        sites: the sites of one export.
        function_writes: the places that the abstract runs wrote to.

    Raises:
        ExportError: forward creates an object in each call, passes it to two Functions, and one writes to it;
            or it creates an object that cannot be copied with its position: an iterator, a random generator.
    """
    sites = list(sites)
    uses = collections.Counter(id(a) for site in sites for a in site.arguments)
    written = {id(site.arguments[i]) for site in sites for i in _written(site, function_writes)}
    for site in sites:
        shared: set[int] = set()
        fresh = []
        for i in range(len(site.arguments)):
            _refuse_stepping(site, i, uses)
            if site.arguments[i] is TENSOR or not _is_mutable(site.arguments[i], written):
                continue
            alone = _references(site.arguments, i) == uses[id(site.arguments[i])]
            if alone and uses[id(site.arguments[i])] > 1 and id(site.arguments[i]) in written:
                raise ExportError(
                    f"{site.func_name}: forward writes to argument {i}, an object that the model creates "
                    f"in each of its calls and passes to several Functions. Let the model hold it in an "
                    f"attribute, or return from forward what it writes"
                )
            if alone or type(site.arguments[i]) is tuple:
                fresh.append(i)
                shared.update(_held(site.arguments[i]))
        site.fresh, site.shared = tuple(fresh), frozenset(shared)
        site.keeps_state = any(i not in fresh for i in _written(site, function_writes))
        paths = function_writes.written.get(site.key, ())
        site.remembers = any(not any(_is_within(path, i) for i in fresh) for path in paths)


def with_copied_arguments(
    site: Site, forward: Callable[..., Any], setup_context: Callable[..., Any] | None
) -> Any:
    """Return ``forward``, in the style with a context, which gets copies of per-call arguments."""

    def copied(arguments: tuple[Any, ...]) -> list[Any]:
        given = list(arguments)
        for i in site.fresh:
            given[i] = _copy(given[i], site.shared, outermost=True)
        return given

    if setup_context is None:
        return lambda ctx, *arguments: forward(ctx, *copied(arguments))

    def both(ctx: Any, *arguments: Any) -> Any:
        given = copied(arguments)
        outputs = forward(*given)
        setup_context(ctx, tuple(given), outputs)
        return outputs

    return both


def _refuse_stepping(site: Site, position: int, uses: collections.Counter[int]) -> None:
    kind = _stepping(site.arguments, position, uses[id(site.arguments[position])])
    if kind is not None:
        raise ExportError(
            f"{site.func_name}: argument {position} is or holds a {kind.__qualname__} that the model creates "
            f"in each of its calls, and a graph has one for all calls, which advances. Create it in the "
            f"Function's forward, from arguments such as a list or a seed"
        )


def _stepping(values: Any, key: Any, uses: int = 1) -> type | None:
    """Return the class of the value, or of one in it, that advances unseen and has no other owner."""
    if type(values[key]) is not tuple and _references(values, key) > uses:
        return None
    kind = type(values[key])
    if steps_unseen(values[key]) or issubclass(kind, _GENERATORS):
        return kind
    found = (_stepping(values[key], k) for k in _items(values[key]))
    return next((inner for inner in found if inner is not None), None)


def _written(site: Site, function_writes: FunctionWrites) -> set[int]:
    """Return the positions of the arguments that ``site``'s forward wrote to."""
    paths = function_writes.written.get(site.key, ())
    return {i for i in range(len(site.arguments)) for path in paths if _is_within(path, i)}


def _is_within(path: str, position: int) -> bool:
    name = f"argument {position}"
    return path == name or path.startswith((f"{name}[", f"{name}."))


def _is_mutable(value: Any, written: set[int]) -> bool:
    """Return True if a call may write to ``value``: a container, or an object that a run wrote to."""
    if type(value) is tuple:
        return any(_is_mutable(v, set()) for v in value)
    return isinstance(value, _CONTAINERS) or id(value) in written


def _references(values: Any, key: Any) -> int:
    return sys.getrefcount(values[key]) - _NOBODY


_NOBODY = 0
_NOBODY = _references(([],), 0) - 1


def _items(value: Any) -> Iterator[Any]:
    if type(value) in (list, tuple):
        yield from range(len(value))
    elif type(value) is dict:
        yield from value


def _held(value: Any) -> Iterator[int]:
    """Yield the ids of the containers in ``value`` that have other owners, too."""
    for key in _items(value):
        if isinstance(value[key], _CONTAINERS) and _references(value, key) > 1:
            yield id(value[key])
        else:
            yield from _held(value[key])


def _copy(value: Any, shared: frozenset[int], *, outermost: bool = False) -> Any:
    kind = type(value)
    if id(value) in shared:
        return value
    if kind in (list, tuple):
        return kind([_copy(v, shared) for v in value])
    if kind is dict:
        return {k: _copy(v, shared) for k, v in value.items()}
    if kind in (set, bytearray):
        return kind(value)
    if not outermost:
        return value
    made = copy.copy(value)
    if hasattr(made, "__dict__"):
        vars(made).update({k: _copy(v, shared) for k, v in vars(made).items()})
    return made
