"""Guards on the places in this process that a graph was made from; they are compared before each step.

A *guard* is one thing outside of the graph that the graph was made from: an entry of a dictionary (an
attribute, a global, a method), the items of a list, the type of an object. The walk that makes the export
cache's key adds one for every place that it reads. Guards compare by identity, in one pass of C++. If a place
contains another object, this module determines once whether the value is nevertheless the same.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import torch

from torch2ort import _native
from torch2ort._torch import global_state as private
from torch2ort.cache.key.constant_bytes import atom, words

# Entries of a class's own dictionary that do not affect its behaviour, or that differ between processes.
SKIPPED = private.TAGGED | words(
    """__dict__ __weakref__ __doc__ __annotate__ __annotate_func__ __annotations_cache__ __abstractmethods__
    __firstlineno__ __static_attributes__ __module__ __parameters__ __orig_bases__ _abc_impl _backward_cls
    next_id"""
)


# torch.func.functional_call replaces parameters by tensors, which are equivalent here.
PLAIN = (torch.Tensor, torch.nn.Parameter)


class Kind(IntEnum):
    """Kind of comparison of a guard; the numbers are those of ``_native.Guards``."""

    ITEMS = 0
    ENTRY = 1
    SEQUENCE = 2
    TYPE = 3
    ATTRIBUTE = 4
    TENSORS = 5
    VALUE = 6
    SIZE = 7


class Guard(NamedTuple):
    """One place that a graph depends on.

    Attributes:
        kind: kind of comparison.
        owner: the dictionary, list or object.
        name: name of the entry or attribute; ``None`` for all of them.
        place: description of the place, for people.
        skipped: keys of the dictionary that no graph depends on.
        always: True if every key counts, whatever names the code reads.
        noun: noun for one of the owner's entries, for people.
        of_functions: labels of the components that contain the place, if no export reads any of them: then
            only Functions read it, whose code runs in each call and may write to it. Otherwise empty.
    """

    kind: Kind
    owner: Any
    name: str | None
    place: str
    skipped: frozenset[str] = frozenset()
    always: bool = False
    noun: str = "entry"
    of_functions: frozenset[str] = frozenset()


class Finder(Protocol):
    """A component in which guards are found."""

    label: str

    def __hash__(self) -> int: ...


class FunctionWrittenPlaces:
    """Places that Functions write to while they run: their own state, which is no part of a graph.

    Attributes:
        components: names of the components that contain nothing else.
    """

    def __init__(self) -> None:
        self.components: set[str] = set()
        self._places: dict[tuple[int, int, str | None], Guard] = {}

    def add(self, guard: Guard, name: str | None) -> None:
        """Add a place; ``name`` is the written attribute, if the guard is on all attributes of an object."""
        # The guard keeps its owner alive, so that no other object gets its address.
        self._places[int(guard.kind), id(guard.owner), name] = guard
        if name is None:
            self.components |= guard.of_functions
        else:
            self.components |= {f"{label}, attribute {name}" for label in guard.of_functions}

    def has(self, guard: Guard, name: str | None) -> bool:
        """Return True if Functions write to the place."""
        return bool(self._places) and (int(guard.kind), id(guard.owner), name) in self._places


class GuardList:
    """Guards in the order found, each place once.

    Attributes:
        pinned: values that only their identity and version identify, each with the component that it is in.
        finder: the component in which places are currently found.
    """

    def __init__(self) -> None:
        # A model has thousands of guards, half of which are found more than once.
        self._found: dict[tuple[int, int, str | None], tuple[Guard, set[Finder]]] = {}
        self.pinned: list[tuple[Finder, Any, int]] = []
        self.finder: Finder

    def guards_of_export(self, traced: Iterable[Finder]) -> tuple[Guard, ...]:
        """Return all guards; those on places that only Functions read come last.

        Args:
            traced: the components that an export reads.
        """
        ours, theirs = [], []
        for guard, finders in self._found.values():
            if finders.isdisjoint(traced):
                theirs.append(guard._replace(of_functions=frozenset(f.label for f in finders)))
            else:
                ours.append(guard)
        return (*ours, *theirs)

    def pin(self, value: Any, version: int = 0) -> None:
        """Identify ``value`` by its identity and version, the number of times that it was written to."""
        self.pinned.append((self.finder, value, version))

    def items(self, owner: Any, place: str, *, skipped: frozenset[str] = frozenset()) -> None:
        """Guard every entry of a dictionary but those skipped, whatever names the code reads."""
        self._add(Kind.ITEMS, owner, None, place, skipped)

    def attributes(
        self, owner: Any, place: str, *, skipped: frozenset[str] = frozenset(), always: bool = False
    ) -> None:
        """Guard the dictionary of an object's attributes.

        Args:
            owner: the dictionary.
            place: description of the object, for people.
            skipped: names that no graph depends on.
            always: True if all others count; otherwise those that the code reads count.
        """
        self._add(Kind.ITEMS, owner, None, place, skipped, always, "attribute")

    def tensors(self, owner: Any, place: str) -> None:
        """Guard a dictionary of tensors that are fed to the graph: names, forms, and which are the same."""
        self._add(Kind.TENSORS, owner, None, place)

    def entry(self, owner: Any, name: str, place: str) -> None:
        """Guard one entry of a dictionary, which may be missing."""
        self._add(Kind.ENTRY, owner, name, place)

    def sequence(self, owner: Any, place: str) -> None:
        """Guard the items of a list or tuple."""
        self._add(Kind.SEQUENCE, owner, None, place)

    def type_of(self, owner: Any, place: str) -> None:
        """Guard the type of an object."""
        self._add(Kind.TYPE, owner, None, place)

    def attribute(self, owner: Any, name: str, place: str) -> None:
        """Guard the value that reading an attribute returns."""
        self._add(Kind.ATTRIBUTE, owner, name, place)

    def value(self, read: Callable[[], Any], identity: Any, place: str) -> None:
        """Guard the result of ``read()``, compared with ``==``.

        Args:
            read: returns plain values, or containers of them; it keeps the object that it reads alive.
            identity: the object that it reads.
            place: description of the object, for people.
        """
        self._add(Kind.VALUE, read, None, place, identity=identity)

    def class_items(self, cls: type, place: str, *, always: bool = False) -> None:
        """Guard every entry of a class's own dictionary."""
        if (entries := _entries(cls)) is not None:
            self.attributes(entries, place, skipped=SKIPPED, always=always)

    def class_entries(self, cls: type, names: Container[str], place: str) -> None:
        """Guard entries of a class's own dictionary by name, and its size, so that none is added."""
        if (entries := _entries(cls)) is not None:
            self._add(Kind.SIZE, entries, None, place)
            for name in entries:
                if name in names:
                    self.entry(entries, name, f"{place}.{name}")

    def _add(
        self,
        kind: Kind,
        owner: Any,
        name: str | None,
        place: str,
        skipped: frozenset[str] = frozenset(),
        always: bool = True,
        noun: str = "entry",
        *,
        identity: Any = None,
    ) -> None:
        """Add a guard unless it is known, by its owner and name or by ``identity``, and note its finder."""
        known = (int(kind), id(owner), name) if identity is None else (int(kind), id(identity), place)
        found = self._found.get(known)
        if found is None:
            self._found[known] = Guard(kind, owner, name, place, skipped, always, noun), {self.finder}
        else:
            found[1].add(self.finder)


class ActiveGuards:
    """Guards with the state that they found, which check before each step that a graph is still valid.

    Args:
        guards: the places; those that only Functions read come last.
        names: every attribute name that the walked code reads; ``None``: it may read any.
        traced_names: the attribute names that code which an export traces reads.
        written: places that Functions write to.

    Attributes:
        moves: number of objects replaced by equivalent ones, such as a tensor by another of its form.
        of_functions: True if there are guards on places that only Functions read.
        changed_of_functions: returns the guards on such places that do not hold.
    """

    def __init__(
        self,
        guards: Iterable[Guard],
        names: frozenset[str] | None,
        traced_names: frozenset[str] | None,
        written: FunctionWrittenPlaces,
    ) -> None:
        self._guards = tuple(guards)
        self._names = names
        self._traced_names = traced_names
        self._written = written
        self._native = _native.Guards(
            [(int(g.kind), g.owner, PLAIN if g.kind is Kind.TENSORS else g.name) for g in self._guards]
        )
        self._tables = [g.owner for g in self._guards if g.kind is Kind.TENSORS]
        self._sharing_before = self._sharing()
        # The guards on places that only Functions read come after these.
        ours = sum(not g.of_functions for g in self._guards)
        self.of_functions = ours < len(self._guards)
        self.changed_of_functions: Callable[[], list[int]] = functools.partial(self._native.all_changed, ours)
        # Positions of the guards on dictionaries, made on first use.
        self._of_owner: dict[int, int] | None = None
        self.moves = 0
        self._is_rearmed = False

    @property
    def is_exact(self) -> bool:
        """True if all places contain the very objects that the walk found."""
        return not self._is_rearmed and self._native.first_changed() < 0

    def _rearm(self, index: int) -> None:
        self._native.rearm(index)
        self._is_rearmed = True

    def __len__(self) -> int:
        return len(self._guards)

    def first_change(self) -> Change | None:
        """Return the change at the first guard that fails; ``None`` if the graph is still valid.

        A guard does not fail if another object has the same plain value, or if no graph depends on the place.
        The expected values stay as they are; :meth:`accept` replaces them.
        """
        return self._compare()[0]

    def accept(self) -> Change | None:
        """Make the present objects the expected ones, if they are equivalent to the previous ones.

        Returns:
            The result of :meth:`first_change`; if that is a change, no object is accepted.
        """
        if self._native.first_changed() < 0:
            return None  # the usual case, at the cost of one call
        change, alike = self._compare()
        if change is None:
            for index in alike:
                self._rearm(index)
                self.moves += not self._guards[index].of_functions
        return change

    def _compare(self) -> tuple[Change | None, Sequence[int]]:
        """Return the first change that matters, and the guards before it with other, equivalent objects."""
        index = self._native.first_changed()
        alike: list[int] = []
        while index >= 0:
            change = self._change(index, self._guards[index])
            if change is not None:
                return change, alike
            alike.append(index)
            index = self._native.first_changed(index + 1)
        tables = [guard for guard in map(self._guards.__getitem__, alike) if guard.kind is Kind.TENSORS]
        if tables and self._sharing() != self._sharing_before:
            return Change(tables[0], None), alike
        return None, alike

    def note_written(self, changed: Iterable[int], before: Container[int]) -> None:
        """Note the places that Functions wrote to while they ran.

        Args:
            changed: the guards on places that only Functions read that do not hold now.
            before: those that did not hold before the Functions ran, as other code had changed the places.
        """
        for index in changed:
            guard = self._guards[index]
            if index in before:
                continue
            if guard.kind is not Kind.ITEMS or guard.noun != "attribute":
                self._written.add(guard, None)
                continue
            then = self._items_before(index)
            for name in {**then, **guard.owner}:
                written = then.get(name, _GONE) is not guard.owner.get(name, _GONE)
                # If an export reads the attribute, too, the graph depends on it.
                if written and name not in guard.skipped and not _counts(name, self._traced_names):
                    self._written.add(guard, str(name))

    def _items_before(self, index: int) -> dict[Any, Any]:
        before = self._native.expected(index)
        return dict(zip(before[::2], before[1::2], strict=True))

    def accept_entries(self, owners: Iterable[Any]) -> None:
        """Make the present content of dictionaries the expected one, if no graph depends on the difference.

        The step itself writes to these dictionaries. After this call, the next comparison finds no difference
        there, and the previous content is released.
        """
        if self._of_owner is None:
            self._of_owner = {id(g.owner): i for i, g in enumerate(self._guards) if g.kind is Kind.ITEMS}
        for owner in owners:
            index = self._of_owner.get(id(owner))
            if index is not None and self._change(index, self._guards[index]) is None:
                self._rearm(index)

    def _sharing(self) -> list[tuple[int, int]]:
        """Return for each tensor the position of the first that is the same, and that shares its memory."""
        first: dict[tuple[str, int], int] = {}
        tensors = [tensor for table in self._tables for tensor in table.values() if tensor is not None]
        return [
            (first.setdefault(("object", id(t)), i), first.setdefault(("memory", private.address_of(t)), i))
            for i, t in enumerate(tensors)
        ]

    def _change(self, index: int, guard: Guard) -> Change | None:
        """Return the change at a guard that code can observe, or ``None``."""
        if self._written.has(guard, None):
            return None
        if guard.kind is Kind.TENSORS:
            return None if self._native.is_alike(index) else Change(guard, None)
        if guard.kind in (Kind.TYPE, Kind.VALUE, Kind.SIZE):
            return Change(guard, None)
        if guard.kind is Kind.ITEMS:
            return self._changed_item(self._items_before(index), guard)
        before = self._native.expected(index)
        if guard.kind is Kind.SEQUENCE:
            alike = len(before) == len(guard.owner) and all(map(same, before, guard.owner))
            return None if alike else Change(guard, None)
        then = before[0] if before else _GONE
        if guard.kind is Kind.ENTRY:
            now = guard.owner.get(guard.name, _GONE)
        else:
            now = getattr(guard.owner, str(guard.name), _GONE)
        return None if same(then, now) else Change.of(guard, guard.name, then, now)

    def _changed_item(self, before: Mapping[Any, Any], guard: Guard) -> Change | None:
        now = guard.owner
        read = None if guard.always else self._names
        counted = {
            k: None
            for k in (*now, *before)
            if k not in guard.skipped and _counts(k, read) and not self._written.has(guard, k)
        }
        for key in counted:
            if not same(before.get(key, _GONE), now.get(key, _GONE)):
                return Change.of(guard, key, before.get(key, _GONE), now.get(key, _GONE))
        # Code may iterate over the dictionary, so its order and the types of its keys count.
        keys = [k for k in before if k in counted], [k for k in now if k in counted]
        return None if all(map(same, *keys)) else Change(guard, None)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the content at the place of a guard.

    Attributes:
        guard: the place.
        name: name of the entry or attribute, if there is one.
        before: the previous value, if both values are plain and short.
        now: the present value, if both are.
    """

    guard: Guard
    name: str | None
    before: str | None = None
    now: str | None = None

    @classmethod
    def of(cls, guard: Guard, name: Any, before: Any, now: Any) -> Change:
        """Return the change of one value."""
        values = [_shown(value) for value in (before, now)]
        return cls(guard, None if name is None else str(name), *(values if all(values) else ()))

    def __str__(self) -> str:
        guard = self.guard
        if self.name is None or guard.kind is Kind.ENTRY:
            place = guard.place
        else:
            noun = "attribute" if guard.kind is Kind.ATTRIBUTE else guard.noun
            place = f"the {noun} '{self.name}' of {guard.place}"
        return place if self.before is None else f"{place} (it was {self.before}, and is {self.now})"


def _shown(value: Any) -> str | None:
    """Return a plain value's ``repr``; ``None`` if it is long, or the value is not plain."""
    if value is _GONE:
        return "missing"
    text = repr(value) if atom(value) is not None else ""
    return text if 0 < len(text) < 40 else None


def _counts(key: Any, read: frozenset[str] | None) -> bool:
    """Return True if code that reads these names may read ``key``; Python itself reads dunder names."""
    return (
        read is None or key in read or (isinstance(key, str) and key.startswith("__") and key.endswith("__"))
    )


_GONE = object()
HEAP_TYPE = 1 << 9


def _entries(cls: type) -> dict[str, Any] | None:
    """Return the dictionary of a class; ``None`` if no code can change it."""
    if not cls.__flags__ & HEAP_TYPE:
        return None
    # A class exposes its dictionary through a proxy, which refers to nothing else.
    (entries,) = gc.get_referents(vars(cls))
    return entries  # type: ignore[no-any-return]


def same(before: Any, now: Any) -> bool:
    """Return True if two values are the same object, or indistinguishable plain values."""
    if before is now:
        return True
    if type(before) is not type(now):
        return False
    data = atom(before)
    return data is not None and data == atom(now)
