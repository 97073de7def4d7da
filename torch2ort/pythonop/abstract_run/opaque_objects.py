"""Objects whose state is not, or not all, in Python containers and attributes that code sets by itself."""

from __future__ import annotations

import ctypes
import io
import queue
from types import WrapperDescriptorType
from typing import Any

import torch
from torch.distributions.utils import lazy_property

# Values as C has them.
FOREIGN: tuple[type, ...] = (ctypes.Array, ctypes.Structure, ctypes.Union, ctypes.c_int.__mro__[1])
# Objects of torch's that compute with their attributes, and keep there what they have computed.
DISTRIBUTIONS: tuple[type, ...] = (torch.distributions.Distribution, torch.distributions.Transform)
_LAST_RESULTS = frozenset(("_cached_x_y", "_inv"))


def steps_unseen(value: Any) -> bool:
    """Whether it is written in C and gives something else, or nothing more, each time that it is asked."""
    if isinstance(value, io.IOBase):
        # Whoever reads a stream moves it on; what is written to one is of no account to a graph.
        return not value.closed and value.readable()
    steps = next((vars(cls)["__next__"] for cls in type(value).__mro__ if "__next__" in vars(cls)), None)
    return isinstance(steps, WrapperDescriptorType) or isinstance(value, queue.SimpleQueue)


def last_results(kind: type) -> frozenset[str]:
    """The attributes in which a transform of this class keeps its last result, and its inverse."""
    return _LAST_RESULTS if issubclass(kind, torch.distributions.Transform) else frozenset()


def is_computed_when_asked(kind: type, name: str) -> bool:
    """Whether a distribution of this class sets the attribute when it is asked for, unless it was given."""
    is_distribution = issubclass(kind, torch.distributions.Distribution)
    return is_distribution and isinstance(getattr(kind, name, None), lazy_property)
