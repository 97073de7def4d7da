"""A tensor that a call passes more than once: ``x is y`` is true in forward, as in eager PyTorch.

A graph has an input for each occurrence and reads the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

# For each tensor of a call, the first position of the same object; empty if all objects are different.
Identical = tuple[int, ...]
_T = TypeVar("_T")


def identical(tensors: Sequence[Any]) -> Identical:
    """Return the first position of each object among ``tensors``; empty if all are different."""
    first: dict[int, int] = {}
    found = tuple([first.setdefault(id(tensor), i) for i, tensor in enumerate(tensors)])
    return found if len(first) < len(tensors) else ()


def as_passed(tensors: Sequence[_T], same: Identical) -> list[_T]:
    """Return ``tensors``, with one object at all positions where the call passed the same object."""
    return [tensors[i] for i in same] if same else list(tensors)
