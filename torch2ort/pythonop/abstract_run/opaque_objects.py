"""Objects whose state is not completely in Python containers and attributes that code sets by itself."""

from __future__ import annotations

import ctypes
import io
import queue
from types import WrapperDescriptorType
from typing import Any

import torch
from torch.distributions.utils import lazy_property

# Types of C values.
FOREIGN: tuple[type, ...] = (ctypes.Array, ctypes.Structure, ctypes.Union, ctypes.c_int.__mro__[1])
# Objects of torch that compute with their attributes, and cache results in attributes.
DISTRIBUTIONS: tuple[type, ...] = (torch.distributions.Distribution, torch.distributions.Transform)
_LAST_RESULTS = frozenset(("_cached_x_y", "_inv"))


def steps_unseen(value: Any) -> bool:
    """Return True for an iterator, stream or queue written in C, which advances with each read."""
    if isinstance(value, io.IOBase):
        # A read advances a stream; writes to a stream do not affect a graph.
        return not value.closed and value.readable()
    steps = next((vars(cls)["__next__"] for cls in type(value).__mro__ if "__next__" in vars(cls)), None)
    return isinstance(steps, WrapperDescriptorType) or isinstance(value, queue.SimpleQueue)


def last_results(kind: type) -> frozenset[str]:
    """Return the attributes in which a transform of this class caches its last result and its inverse."""
    return _LAST_RESULTS if issubclass(kind, torch.distributions.Transform) else frozenset()


def is_computed_when_asked(kind: type, name: str) -> bool:
    """Return True if a distribution of this class computes the attribute when read, unless it was given."""
    is_distribution = issubclass(kind, torch.distributions.Distribution)
    return is_distribution and isinstance(getattr(kind, name, None), lazy_property)
