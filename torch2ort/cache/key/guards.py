"""What a graph was made from, where it stands in this process: one guard a place, compared before each step.

A *guard* is one thing outside of the graph that the graph was made from: an entry of a dictionary (an
attribute, a global, a method), the items of a list, the type of an object. The walk that makes the export
cache's key leaves one for every place that it reads. Guards compare by identity, in one pass of C++; what is
another object and yet the same value is told apart here, once, when it is met.
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

# Of a class's own dictionary: what says nothing about how it works, or is another number in each process.
SKIPPED = private.TAGGED | words(
    """__dict__ __weakref__ __doc__ __annotate__ __annotate_func__ __annotations_cache__ __abstractmethods__
    __firstlineno__ __static_attributes__ __module__ __parameters__ __orig_bases__ _abc_impl _backward_cls
    next_id"""
)


# What torch.func.functional_call puts in a parameter's place is as good as one.
PLAIN = (torch.Tensor, torch.nn.Parameter)


class Kind(IntEnum):
    """How a guard compares; the numbers are those of ``_native.Guards``."""

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
        kind: how it is compared.
        owner: the dictionary, list or object.
        name: of the entry or attribute; ``None`` for all of them.
        place: what people call it.
        skipped: keys of the dictionary that no graph depends on.
        always: whether every key counts, whatever names the code reads.
        noun: what one of the owner's entries is to people.
        of_functions: the components that read it, if all of them are read by Functions alone, whose code
            runs in each call, and may write there.
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
    """A component, to the guards that are found in it."""

    label: str

    def __hash__(self) -> int: ...


class Written:
    """What Functions write to while they run: their own state, which is no part of a graph.

    Attributes:
        components: names of the components that hold nothing else.
    """

    def __init__(self) -> None:
        self.components: set[str] = set()
        self._places: dict[tuple[int, int, str | None], Guard] = {}

    def add(self, guard: Guard, name: str | None) -> None:
        """Note a place; ``name`` is the attribute that was written, if the guard is on all of an object's."""
        # The guard keeps its owner, so that its address stays its own.
        self._places[int(guard.kind), id(guard.owner), name] = guard
        if name is None:
            self.components |= guard.of_functions
        else:
            self.components |= {f"{label}, attribute {name}" for label in guard.of_functions}

    def has(self, guard: Guard, name: str | None) -> bool:
        """Whether it is a place that Functions write to."""
        return bool(self._places) and (int(guard.kind), id(guard.owner), name) in self._places


class GuardList:
    """Guards in the order found, each place once.

    Attributes:
        pinned: values that only their identity and version tell, each with what it was found in.
        finder: what the places are found in at present.
    """

    def __init__(self) -> None:
        # A model has thousands, half of which are found more than once.
        self._found: dict[tuple[int, int, str | None], tuple[Guard, set[Finder]]] = {}
        self.pinned: list[tuple[Finder, Any, int]] = []
        self.finder: Finder

    def found(self, traced: Iterable[Finder]) -> tuple[Guard, ...]:
        """All guards; those that only Functions read come last.

        Args:
            traced: the finders that an export reads.
        """
        ours, theirs = [], []
        for guard, finders in self._found.values():
            if finders.isdisjoint(traced):
                theirs.append(guard._replace(of_functions=frozenset(f.label for f in finders)))
            else:
                ours.append(guard)
        return (*ours, *theirs)

    def pin(self, value: Any, version: int = 0) -> None:
        """Let the identity of ``value`` stand for it, and the number of times that it was written to."""
        self.pinned.append((self.finder, value, version))

    def items(self, owner: Any, place: str, *, skipped: frozenset[str] = frozenset()) -> None:
        """Every entry of a dictionary but those skipped, whatever names the code reads."""
        self._add(Kind.ITEMS, owner, None, place, skipped)

    def attributes(
        self, owner: Any, place: str, *, skipped: frozenset[str] = frozenset(), always: bool = False
    ) -> None:
        """The dictionary of an object's attributes.

        Args:
            owner: the dictionary.
            place: what people call the object.
            skipped: names that no graph depends on.
            always: whether all others count; else those that the code reads.
        """
        self._add(Kind.ITEMS, owner, None, place, skipped, always, "attribute")

    def tensors(self, owner: Any, place: str) -> None:
        """A dictionary of tensors that are fed to the graph: names, forms, and which are the same."""
        self._add(Kind.TENSORS, owner, None, place)

    def entry(self, owner: Any, name: str, place: str) -> None:
        """One entry of a dictionary, which may be missing."""
        self._add(Kind.ENTRY, owner, name, place)

    def sequence(self, owner: Any, place: str) -> None:
        """The items of a list or tuple."""
        self._add(Kind.SEQUENCE, owner, None, place)

    def type_of(self, owner: Any, place: str) -> None:
        """The type of an object."""
        self._add(Kind.TYPE, owner, None, place)

    def attribute(self, owner: Any, name: str, place: str) -> None:
        """What reading an attribute gives."""
        self._add(Kind.ATTRIBUTE, owner, name, place)

    def value(self, read: Callable[[], Any], identity: Any, place: str) -> None:
        """What ``read()`` gives, compared with ``==``.

        Args:
            read: gives plain values, or containers of them; it keeps what it reads.
            identity: the object that it reads.
            place: what people call it.
        """
        self._add(Kind.VALUE, read, None, place, identity=identity)

    def class_items(self, cls: type, place: str, *, always: bool = False) -> None:
        """Every entry of a class's own dictionary."""
        if (entries := _entries(cls)) is not None:
            self.attributes(entries, place, skipped=SKIPPED, always=always)

    def class_entries(self, cls: type, names: Container[str], place: str) -> None:
        """Those entries of a class's own dictionary, and that none is added."""
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
        """Note a guard that is not known yet, by its owner and name, or else by ``identity``."""
        known = (int(kind), id(owner), name) if identity is None else (int(kind), id(identity), place)
        found = self._found.get(known)
        if found is None:
            self._found[known] = Guard(kind, owner, name, place, skipped, always, noun), {self.finder}
        else:
            found[1].add(self.finder)


class Armed:
    """Guards with the state that they found: whether a graph still holds, at the cost of a step.

    Args:
        guards: the places; those that only Functions read come last.
        names: every attribute name that the walked code reads; ``None``: it may read any.
        traced_names: those that code reads which an export traces.
        written: places that Functions write to.

    Attributes:
        moves: counts what was replaced by something as good, such as a tensor by another of its form.
        of_functions: whether there is anything that only Functions read.
        changed_of_functions: gives the guards that do not hold, of what only Functions read.
    """

    def __init__(
        self,
        guards: Iterable[Guard],
        names: frozenset[str] | None,
        traced_names: frozenset[str] | None,
        written: Written,
    ) -> None:
        self._guards = tuple(guards)
        self._names = names
        self._traced_names = traced_names
        self._written = written
        self._native = _native.Guards(
            [(int(g.kind), g.owner, PLAIN if g.kind is Kind.TENSORS else g.name) for g in self._guards]
        )
        self._tables = [g.owner for g in self._guards if g.kind is Kind.TENSORS]
        self._ties = self._tied()
        # The guards of what only Functions read come behind these.
        ours = sum(not g.of_functions for g in self._guards)
        self.of_functions = ours < len(self._guards)
        self.changed_of_functions: Callable[[], list[int]] = functools.partial(self._native.all_changed, ours)
        # Positions of the guards on dictionaries, once somebody asks.
        self._of_owner: dict[int, int] | None = None
        self.moves = 0
        self._is_rearmed = False

    @property
    def is_exact(self) -> bool:
        """Whether all places hold the very objects that the walk found."""
        return not self._is_rearmed and self._native.first_changed() < 0

    def _rearm(self, index: int) -> None:
        self._native.rearm(index)
        self._is_rearmed = True

    def __len__(self) -> int:
        return len(self._guards)

    def changed(self) -> Change | None:
        """What holds something else that matters, at the first guard that tells so, or ``None``.

        Another object of the same plain value, and what no graph depends on, does not matter. Nothing is
        noted: the next comparison is with the same state.
        """
        return self._compared()[0]

    def accept(self) -> Change | None:
        """Compare with the present objects from now on, if they are as good as those that were there.

        Returns:
            What :meth:`changed` does; if that is something, nothing is accepted.
        """
        if self._native.first_changed() < 0:
            return None  # as before nearly every step, at the cost of one call
        change, alike = self._compared()
        if change is None:
            for index in alike:
                self._rearm(index)
                self.moves += not self._guards[index].of_functions
        return change

    def _compared(self) -> tuple[Change | None, Sequence[int]]:
        """The first change that matters, and up to there the guards on another object that is as good."""
        index = self._native.first_changed()
        alike: list[int] = []
        while index >= 0:
            change = self._change(index, self._guards[index])
            if change is not None:
                return change, alike
            alike.append(index)
            index = self._native.first_changed(index + 1)
        tables = [guard for guard in map(self._guards.__getitem__, alike) if guard.kind is Kind.TENSORS]
        if tables and self._tied() != self._ties:
            return Change(tables[0], None), alike
        return None, alike

    def note_written(self, changed: Iterable[int], before: Container[int]) -> None:
        """Note what Functions wrote while they ran.

        Args:
            changed: the guards that do not hold now, of what only Functions read.
            before: those that did not hold before they ran: somebody else has changed that.
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
                # An export that reads it, too, has read it for good.
                if written and name not in guard.skipped and not _counts(name, self._traced_names):
                    self._written.add(guard, str(name))

    def _items_before(self, index: int) -> dict[Any, Any]:
        before = self._native.expected(index)
        return dict(zip(before[::2], before[1::2], strict=True))

    def accept_entries(self, owners: Iterable[Any]) -> None:
        """Compare with what dictionaries hold now, where the difference does not matter.

        A step that writes to them does so itself: the next comparison need not look, and what they held
        before is let go.
        """
        if self._of_owner is None:
            self._of_owner = {id(g.owner): i for i, g in enumerate(self._guards) if g.kind is Kind.ITEMS}
        for owner in owners:
            index = self._of_owner.get(id(owner))
            if index is not None and self._change(index, self._guards[index]) is None:
                self._rearm(index)

    def _tied(self) -> list[tuple[int, int]]:
        """Which tensors are the same, and which share their memory: the position of the first of them."""
        first: dict[tuple[str, int], int] = {}
        tensors = [tensor for table in self._tables for tensor in table.values() if tensor is not None]
        return [
            (first.setdefault(("object", id(t)), i), first.setdefault(("memory", private.address_of(t)), i))
            for i, t in enumerate(tensors)
        ]

    def _change(self, index: int, guard: Guard) -> Change | None:
        """What is other than before to code, if anything is."""
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
        # Code may walk over the dictionary: its order counts, and the types of its keys.
        keys = [k for k in before if k in counted], [k for k in now if k in counted]
        return None if all(map(same, *keys)) else Change(guard, None)


@dataclass(frozen=True, slots=True)
class Change:
    """Something else at the place of a guard.

    Attributes:
        guard: the place.
        name: of the entry or attribute, if it is one.
        before: what was there, if that is a plain value.
        now: what is there, if both are.
    """

    guard: Guard
    name: str | None
    before: str | None = None
    now: str | None = None

    @classmethod
    def of(cls, guard: Guard, name: Any, before: Any, now: Any) -> Change:
        """The change of one value."""
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
    """A plain value as people write it, unless that is long."""
    if value is _GONE:
        return "missing"
    text = repr(value) if atom(value) is not None else ""
    return text if 0 < len(text) < 40 else None


def _counts(key: Any, read: frozenset[str] | None) -> bool:
    """Whether code that reads these names may come upon ``key``; Python itself reads names in underscores."""
    return (
        read is None or key in read or (isinstance(key, str) and key.startswith("__") and key.endswith("__"))
    )


_GONE = object()
HEAP_TYPE = 1 << 9


def _entries(cls: type) -> dict[str, Any] | None:
    """The dictionary behind a class; ``None`` if nobody can change it."""
    if not cls.__flags__ & HEAP_TYPE:
        return None
    # A class shows its dictionary through a proxy, which refers to nothing else.
    (entries,) = gc.get_referents(vars(cls))
    return entries  # type: ignore[no-any-return]


def same(before: Any, now: Any) -> bool:
    """Whether two values are the same object, or plain values that nobody can tell apart."""
    if before is now:
        return True
    if type(before) is not type(now):
        return False
    data = atom(before)
    return data is not None and data == atom(now)
