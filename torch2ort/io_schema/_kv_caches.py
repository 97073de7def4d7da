"""Caches of transformers: objects that consist of their attributes, and that `forward` fills.

A decoder accepts and returns its keys and values in a ``DynamicCache`` or a related class. Such an object is
flattened into its attributes. Where `forward` returns the very cache that it was given, the rebuilt data
contains that object again, with its new content: see :func:`refilled`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

_HOME: Final = "transformers.cache_utils"
_PLAIN: Final = (torch.dtype, torch.device, type)


def is_cache(cls: type) -> bool:
    """Return True for a class of transformers' caches or their parts, without importing transformers."""
    return any(base.__module__ == _HOME for base in cls.__mro__)


def split_cache(value: Any) -> tuple[list[Any], tuple[Any, ...], Any]:
    """Take a cache apart: its attributes, their names, and those that are types instead of data."""
    attributes = vars(value)
    plain = tuple((name, item) for name, item in attributes.items() if isinstance(item, _PLAIN))
    names = tuple(name for name, item in attributes.items() if not isinstance(item, _PLAIN))
    return [attributes[name] for name in names], names, plain


def join_cache(cls: Any, keys: tuple[Any, ...], detail: Any, children: Sequence[Any]) -> Any:
    """Rebuild a cache, in the object that :func:`refilled` passed for it if there is one."""
    rebuilt = _wanted.next()
    if type(rebuilt) is not cls:
        rebuilt = cls.__new__(cls)
    attributes = vars(rebuilt)
    attributes.clear()
    attributes.update(zip(keys, children, strict=True))
    attributes.update(detail)
    return rebuilt


class _Wanted(threading.local):
    """The objects to use for the caches of one structure, by their number."""

    objects: Mapping[int, Any] = {}
    count = 0

    def next(self) -> Any:
        self.count += 1
        return self.objects.get(self.count - 1)


_wanted: Final = _Wanted()


@contextlib.contextmanager
def refilled(objects: Mapping[int, Any]) -> Iterator[None]:
    """Rebuild caches in these objects inside the context; a key is a cache's position, parts first."""
    before = _wanted.objects, _wanted.count
    _wanted.objects, _wanted.count = objects, 0
    try:
        yield
    finally:
        _wanted.objects, _wanted.count = before
