"""Arguments that the model's forward makes anew for each call: ``apply(x, {"n": 1})``.

A graph has one object for such an argument. Where forward may write to it, each call gets a copy of it.
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
from torch2ort.pythonop.abstract_run.object_rollback import Traces
from torch2ort.pythonop.abstract_run.opaque_objects import steps_unseen
from torch2ort.pythonop.site import TENSOR, Site

_CONTAINERS = (list, dict, set, bytearray)
_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)


def find_fresh(sites: Iterable[Site], traces: Traces) -> None:
    """Fill :attr:`Site.fresh`, ``shared``, ``keeps_state`` and ``remembers``.

    To be called when nobody but the model holds its objects.

    Args:
        sites: of one export.
        traces: what the abstract runs wrote to.

    Raises:
        ExportError: forward makes an object anew, gives it to two calls, and one writes to it; or it makes
            one of which no copy is where it was: an iterator, a generator of random numbers.
    """
    sites = list(sites)
    uses = collections.Counter(id(a) for site in sites for a in site.arguments)
    written = {id(site.arguments[i]) for site in sites for i in _written(site, traces)}
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
                    f"{site.func_name}: forward writes to argument {i}, an object that the model makes anew "
                    f"in each of its calls and gives to several Functions. Let the model hold it in an "
                    f"attribute, or return from forward what it writes"
                )
            if alone or type(site.arguments[i]) is tuple:
                fresh.append(i)
                shared.update(_held(site.arguments[i]))
        site.fresh, site.shared = tuple(fresh), frozenset(shared)
        site.keeps_state = any(i not in fresh for i in _written(site, traces))
        paths = traces.written.get(site.key, ())
        site.remembers = any(not any(_is_within(path, i) for i in fresh) for path in paths)


def anew(site: Site, forward: Callable[..., Any], setup_context: Callable[..., Any] | None) -> Any:
    """``forward``, in the style with a context, that gets copies of what is made anew for each call."""

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
            f"{site.func_name}: argument {position} is or holds a {kind.__qualname__} that the model makes "
            f"anew in each of its calls, and a graph has one for all calls, which steps on. Make it in the "
            f"Function's forward, out of arguments such as a list or a seed"
        )


def _stepping(values: Any, key: Any, uses: int = 1) -> type | None:
    """The class of what steps on without showing where it is, there or within, and that nobody else holds."""
    if type(values[key]) is not tuple and _references(values, key) > uses:
        return None
    kind = type(values[key])
    if steps_unseen(values[key]) or issubclass(kind, _GENERATORS):
        return kind
    found = (_stepping(values[key], k) for k in _items(values[key]))
    return next((inner for inner in found if inner is not None), None)


def _written(site: Site, traces: Traces) -> set[int]:
    """Positions of the arguments that ``site``'s forward wrote to."""
    paths = traces.written.get(site.key, ())
    return {i for i in range(len(site.arguments)) for path in paths if _is_within(path, i)}


def _is_within(path: str, position: int) -> bool:
    name = f"argument {position}"
    return path == name or path.startswith((f"{name}[", f"{name}."))


def _is_mutable(value: Any, written: set[int]) -> bool:
    """Whether a call may write to ``value``: to containers always, to other objects if one was seen to."""
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
    """Ids of the containers in ``value`` that others hold too."""
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
