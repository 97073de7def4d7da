"""A thread-safe table of frozen entries by name, the base of every registry."""

from __future__ import annotations

import contextlib
import contextvars
import difflib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import torch

from torch2ort.errors import RegistryError
from torch2ort.pythonop.site import qualified_name

Value = TypeVar("Value")
FunctionClass: TypeAlias = type[torch.autograd.Function]

# One lock for all tables, so that a name's entries are added and removed together.
LOCK = threading.RLock()

_builtin: contextvars.ContextVar[bool] = contextvars.ContextVar("torch2ort_builtin", default=False)


@contextlib.contextmanager
def builtin_entries() -> Iterator[None]:
    """Mark entries that are registered inside the context as built-in: a user's entry precedes them."""
    token = _builtin.set(True)
    try:
        yield
    finally:
        _builtin.reset(token)


@dataclass(frozen=True, slots=True)
class Registration(Generic[Value]):
    """One registration.

    Attributes:
        name: the qualified name that it applies to.
        function: the class that it applies to; ``None`` if it was registered by name, for every such class.
        value: the registered value.
    """

    name: str
    function: FunctionClass | None
    value: Value


class Table(Generic[Value]):
    """Entries of one kind by name, a user's in front of built-in ones.

    Args:
        verb: the public function that registers, for messages.
        noun: noun for an entry, for messages.
    """

    def __init__(self, verb: str, noun: str) -> None:
        self.verb = verb
        self.noun = noun
        self._users: dict[str, Registration[Value]] = {}
        self._builtin: dict[str, Registration[Value]] = {}
        self._matched: set[str] = set()
        self._reported: set[str] = set()

    def add(self, name: str, function: FunctionClass | None, value: Value, *, override: bool) -> None:
        """Register ``value`` under ``name``.

        Raises:
            RegistryError: the name has an entry, and ``override`` is false.
        """
        entries = self._builtin if _builtin.get() else self._users
        with LOCK:
            if name in entries and not override:
                raise RegistryError(
                    f"{self.verb}: '{name}' already has {self.noun}; pass override=True to replace it, or "
                    f"call torch2ort.unregister('{name}') first"
                )
            entries[name] = Registration(name, function, value)
            self._matched.discard(name)
            self._reported.discard(name)

    def remove(self, name: str) -> bool:
        """Remove every entry of ``name``, and return whether there was one."""
        with LOCK:
            found = [entries.pop(name, None) for entries in (self._users, self._builtin)]
            return any(entry is not None for entry in found)

    def find(self, name: str, function: type | None = None) -> Registration[Value] | None:
        """Return the entry that applies to ``function``, and mark it as matched.

        Args:
            name: a qualified name.
            function: the class of that name, if it is known. An entry for another class of the
                same name does not apply to it.
        """
        with LOCK:
            for entries in (self._users, self._builtin):
                entry = entries.get(name)
                if entry is not None and (function is None or entry.function in (None, function)):
                    self._matched.add(name)
                    return entry
            return None

    def has(self, name: str) -> bool:
        """Return True if ``name`` has an entry for any class."""
        with LOCK:
            return name in self._users or name in self._builtin

    def entries(self) -> dict[str, Registration[Value]]:
        """Return a snapshot of the entry that applies to each name."""
        with LOCK:
            return {**self._builtin, **self._users}

    def take_unmatched(self) -> list[Registration[Value]]:
        """Return users' entries that :meth:`find` never returned, except for those already reported."""
        with LOCK:
            done = self._matched | self._reported
            return [entry for name, entry in self._users.items() if name not in done]

    def mark_reported(self, name: str) -> bool:
        """Mark ``name`` as reported, and return whether it was reported before."""
        with LOCK:
            before = name in self._reported
            self._reported.add(name)
            return before


def key_of(function: object, verb: str) -> tuple[str, FunctionClass | None]:
    """Return the qualified name, and the class if one was given.

    Raises:
        RegistryError: ``function`` is neither a qualified name nor a Function class.
    """
    if isinstance(function, type) and issubclass(function, torch.autograd.Function):
        return qualified_name(function), function
    if isinstance(function, str):
        module, _, name = function.rpartition(".")
        if module and name:
            return function, None
        raise RegistryError(
            f"{verb}: {function!r} is no qualified name; expected module and class, such as "
            f"'mylib.ops.{function or 'Gelu'}' (f'{{cls.__module__}}.{{cls.__qualname__}}')"
        )
    owner = getattr(function, "__self__", None)
    hint = "pass the class itself, not its apply" if isinstance(owner, type) else "pass one of the two"
    raise RegistryError(
        f"{verb}: expected a qualified name or a subclass of torch.autograd.Function, got {function!r}; "
        f"{hint}"
    )


def check_callable(value: object, verb: str, what: str) -> None:
    """Raise :class:`RegistryError` if ``value`` cannot be called."""
    if not callable(value):
        raise RegistryError(f"{verb}: expected {what} as a callable, got {value!r}")


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """Return up to three of ``names`` that are similar to ``name``, the nearest first."""
    last = name.rpartition(".")[2]
    candidates = sorted(set(names) - {name})
    same = [other for other in candidates if other.rpartition(".")[2].lower() == last.lower()]
    close = difflib.get_close_matches(name, candidates, n=3, cutoff=0.8)
    return list(dict.fromkeys([*same, *close]))[:3]


def did_you_mean(names: list[str]) -> str:
    """Return a clause that suggests ``names``, or an empty string."""
    return f"; did you mean {' or '.join(repr(n) for n in names)}?" if names else ""
