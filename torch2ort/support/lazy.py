"""Values that are made on request."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_Value = TypeVar("_Value")


class Lazy(Generic[_Value]):
    """A value that is made once, by the first thread that requests it.

    Args:
        make: makes the value; it is released afterwards, with all that it holds.
    """

    def __init__(self, make: Callable[[], _Value]) -> None:
        self._make: Callable[[], _Value] | None = make
        self._made: list[_Value] = []
        self._lock = threading.RLock()

    def get(self) -> _Value:
        """Return the value; not allowed after :meth:`release`."""
        if not self._made:
            with self._lock:
                if not self._made:
                    assert self._make is not None, "the value was released"
                    self._made.append(self._make())
                    self._make = None
        return self._made[0]

    def fork(self) -> Lazy[_Value]:
        """Return another object for the same value, which :meth:`release` of this one leaves as it is."""
        with self._lock:
            if self._made:
                value = self._made[0]
                return Lazy(lambda: value)
            assert self._make is not None, "the value was released"
            return Lazy(self._make)

    def release(self) -> None:
        """Release the value, and the function that makes it."""
        with self._lock:
            self._make = None
            self._made.clear()
