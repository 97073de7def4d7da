"""Caches among the arguments of a call that the call fills further and returns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch2ort.errors import ExportError
from torch2ort.io_schema._kv_caches import refilled
from torch2ort.io_schema._leaves import is_leaf, type_name
from torch2ort.io_schema._schema import Schema, unflatten
from torch2ort.io_schema._structure import flatten_tree, open_one

Returned = tuple[tuple[int, int], ...]
"""Pairs of indices: a cache among those of the outputs, and the same cache among those of the inputs."""


class GivenCaches:
    """The caches among the arguments of a call that is traced, as they were before it.

    Args:
        bound: the arguments by name.
    """

    def __init__(self, bound: dict[str, Any]) -> None:
        self._caches = _caches_in(bound)
        self._before = [flatten_tree(cache) for cache in self._caches]

    def returned_in(self, outputs: Any) -> Returned:
        """Return the caches among ``outputs`` that the call was given.

        Raises:
            ExportError: forward changed a given cache and does not return it.
        """
        if not self._caches:
            return ()
        numbers = {id(cache): number for number, cache in enumerate(self._caches)}
        results = _caches_in(outputs)
        # A cache is checked before its parts.
        for cache, (leaves, spec) in reversed(list(zip(self._caches, self._before, strict=True))):
            after, spec_after = flatten_tree(cache)
            same = spec == spec_after and all(a is b for a, b in zip(leaves, after, strict=True))
            if not same and not any(result is cache for result in results):
                raise ExportError(
                    f"forward changes the {type_name(type(cache))} that it is given and does not return it, "
                    f"and a graph returns only what forward returns. Return it, or call the model without "
                    f"a cache (use_cache=False)"
                )
        return tuple((i, numbers[id(result)]) for i, result in enumerate(results) if id(result) in numbers)


def unflatten_into(bound: dict[str, Any], returned: Returned, tensors: Iterable[Any], schema: Schema) -> Any:
    """Build the result of a call; a cache that the call was given is that very object in the result.

    Args:
        bound: the call's arguments by name.
        returned: the pairs that :meth:`GivenCaches.returned_in` found when the model was traced.
        tensors: see :func:`unflatten`.
        schema: see :func:`unflatten`.
    """
    if not returned:
        return unflatten(tensors, schema)
    given = _caches_in(bound)
    with refilled({output: given[number] for output, number in returned}):
        return unflatten(tensors, schema)


def _caches_in(data: Any) -> list[Any]:
    """Return every cache in ``data``, the parts of a cache before it."""
    found: list[Any] = []
    _collect(data, found)
    return found


def _collect(value: Any, found: list[Any]) -> None:
    opened = None if is_leaf(value) else open_one(value)
    if opened is None:
        return
    node, children = opened
    for child in children:
        _collect(child, found)
    if node.kind == "cache":
        found.append(value)
