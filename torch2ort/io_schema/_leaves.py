"""Leaves of nested data, and the rule by which values count as the same."""

from __future__ import annotations

from types import NoneType
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Hashable

CONSTANT_TYPES: Final = frozenset({NoneType, str, bool, int, float})
"""Exact types of the constants. A subclass (an ``IntEnum``, ``numpy.float64``) is not one of them."""

SYMBOLIC_TYPES: Final = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""Numbers that exist only while a model is traced."""


class UnsupportedError(Exception):
    """Something in the data cannot be flattened. The caller, which knows the path, raises a SchemaError."""


class _Identity:
    """Wrapper of an object that equals nothing but itself, whatever the object's ``__eq__`` computes."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def exact(value: Any) -> Hashable:
    """Return a token that is equal for two values only if their types and values are.

    Python's ``==`` is too lenient here (``True == 1 == 1.0``, ``0.0 == -0.0``) and once too strict
    (``nan != nan``).

    Args:
        value: A constant, a dictionary key, or the metadata of a container.

    Raises:
        UnsupportedError: The value is neither hashable nor a list or dict of such values.
    """
    cls = type(value)
    if cls is float:
        return cls, value.hex()
    if isinstance(value, (tuple, list)):
        return cls, tuple(map(exact, value))
    if cls is dict:
        return cls, tuple((exact(key), exact(item)) for key, item in value.items())
    if cls is frozenset:
        return cls, frozenset(map(exact, value))
    if isinstance(value, torch.Tensor):
        return cls, _Identity(value)
    try:
        hash(value)
    except TypeError:
        raise UnsupportedError(
            f"its factory or metadata is of type {type_name(cls)}, which is not hashable and so cannot be "
            "compared. Use something hashable."
        ) from None
    return cls, value


def is_leaf(value: Any) -> bool:
    """Return True if `value` is a tensor or a constant."""
    return type(value) in CONSTANT_TYPES or isinstance(value, torch.Tensor)


def type_name(cls: type) -> str:
    """Return the name under which a reader knows `cls`: qualified, unless it is a builtin."""
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
