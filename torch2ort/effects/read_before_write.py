"""Search for the places that forward reads before it writes them, among those that it writes to.

A list that forward only appends to, or an attribute that it sets first, is no state that a graph depends on.
One run of forward finds them: lists and dictionaries are replaced by others that record their uses, and
attributes by properties of their class.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from torch2ort.cache.key.constant_bytes import words
from torch2ort.cache.key.write_only_state import WriteOnlyState
from torch2ort.effects.reachable_state import ReachableState
from torch2ort.effects.side_effects import ItemsWritten, KeysWritten, Write
from torch2ort.pythonop.abstract_run.object_snapshot import Holder, Items, Named

_ABSENT: Any = object()


class _Noting:
    """Record of the uses of a container, as a base class.

    Attributes:
        read: True if the previous contents were read.
        cleared: True if they were removed without being read.
        written: keys that were set before they were read.
        asked: keys that were read first.
        first: the previous items of a list.
    """

    read = cleared = False
    written: set[Any]
    asked: set[Any]
    first: list[Any]

    def look(self) -> None:
        """Record a read of the whole container."""
        if not self.cleared:
            self.read = True

    def ask(self, key: Any) -> None:
        """Record a read of ``key``."""
        if not self.cleared and key not in self.written:
            self.asked.add(key)

    def note_write(self, key: Any) -> None:
        """Record a write of ``key``."""
        if key not in self.asked:
            self.written.add(key)


def _looking(method: Callable[..., Any]) -> Callable[..., Any]:
    def looks(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.look()
        return method(self, *args, **kwargs)

    return looks


def _asking(method: Callable[..., Any]) -> Callable[..., Any]:
    def asks(self: Any, key: Any, *args: Any) -> Any:
        self.ask(key)
        return method(self, key, *args)

    return asks


def _base(self: Any) -> Any:
    """Return the class of the container that this one replaces."""
    return type(self).__mro__[2]


def _clear(self: Any) -> None:
    if not self.read:
        self.cleared = True
    _base(self).clear(self)


def _set_item(self: Any, key: Any, value: Any) -> None:
    if key == slice(None) and isinstance(self, list):
        _clear(self)
        self.extend(value)
        return
    self.look()
    _base(self).__setitem__(self, key, value)


def _delete_item(self: Any, key: Any) -> None:
    if key == slice(None) and isinstance(self, list):
        _clear(self)
        return
    self.look()
    _base(self).__delitem__(self, key)


def _set_key(self: Any, key: Any, value: Any) -> None:
    self.note_write(key)
    _base(self).__setitem__(self, key, value)


def _update(self: Any, *args: Any, **kwargs: Any) -> None:
    for key, value in dict(*args, **kwargs).items():
        self[key] = value


def _update_in_place(self: Any, other: Any) -> Any:
    _update(self, other)
    return self


def _array(self: Any, *args: Any, **kwargs: Any) -> Any:
    return np.array(list(self), *args)


_ASKED = ("__getitem__", "__contains__", "__delitem__", "get", "pop", "setdefault")
# Methods that write to a container of each kind without reading it.
_WRITES: dict[type, dict[str, Any]] = {
    list: {"clear": _clear, "__setitem__": _set_item, "__delitem__": _delete_item},
    collections.deque: {"clear": _clear},
    dict: {
        "clear": _clear, "__setitem__": _set_key, "update": _update, "__ior__": _update_in_place,
        **{name: _asking(getattr(dict, name)) for name in _ASKED},
    },
}  # fmt: skip
_WRITES[collections.defaultdict] = {
    **_WRITES[dict],
    "__getitem__": _asking(collections.defaultdict.__getitem__),
}
_SILENT = frozenset({"append", "extend", "__iadd__"})
# Members of object, which show nothing of a list's contents.
_OF_OBJECT = words(
    """__class__ __class_getitem__ __delattr__ __dir__ __doc__ __getattribute__ __getstate__ __hash__ __init__
    __init_subclass__ __new__ __setattr__ __subclasshook__ __missing__ default_factory maxlen"""
)


def _class(kind: type) -> type:
    base: Any = kind
    named: dict[str, Any] = {"__array__": _array}
    inherited = vars(dict) if issubclass(kind, dict) else {}
    for name, member in {**inherited, **vars(kind)}.items():
        if callable(member) and name not in _OF_OBJECT and name not in _SILENT:
            named[name] = _looking(member)
    named["__reduce_ex__"] = _looking(object.__reduce_ex__)
    if not issubclass(kind, dict):
        named["__radd__"] = _looking(lambda self, other: other + base(self))
    named.update(_WRITES[kind])
    return type(kind.__name__, (_Noting, kind), named)


_CLASSES = {kind: _class(kind) for kind in _WRITES}


def _noting(holder: Holder[Any]) -> Any:
    """Return an empty recording container like that of ``holder``."""
    kind = type(holder.value)
    cls: Any = _CLASSES[kind]
    if kind is collections.deque:
        made = cls((), holder.value.maxlen)
    elif kind is collections.defaultdict:
        made = cls(holder.value.default_factory)
    else:
        made = cls()
    made.written, made.asked, made.first = set(), set(), []
    return made


def _is_used(made: Any) -> bool:
    """Return True if forward used the recording container, not the original that it may keep elsewhere."""
    items = list(_base(made).__iter__(made))
    kept = len(items) == len(made.first) and all(a is b for a, b in zip(items, made.first, strict=True))
    return made.cleared or not kept


class _Attribute:
    """A property that replaces an attribute of some objects, and records reads before the first write."""

    def __init__(self, name: str, before: Any) -> None:
        self._name, self._before = name, before
        self.values: dict[int, Any] = {}
        self.objects: set[int] = set()
        self.read: set[int] = set()
        self.written: set[int] = set()

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        if owner is None:
            if self._before is _ABSENT:
                raise AttributeError(self._name)
            return self._before
        if id(owner) not in self.written:
            self.read.add(id(owner))
        values: dict[Any, Any] = self.values if id(owner) in self.objects else vars(owner)
        found = values.get(id(owner) if values is self.values else self._name, _ABSENT)
        if found is not _ABSENT:
            return found
        if self._before is _ABSENT:
            raise AttributeError(self._name)
        inherited = self._before
        return inherited.__get__(owner, kind) if hasattr(type(inherited), "__get__") else inherited

    def __set__(self, owner: Any, value: Any) -> None:
        if id(owner) not in self.read:
            self.written.add(id(owner))
        if id(owner) in self.objects:
            self.values[id(owner)] = value
        else:
            vars(owner)[self._name] = value

    def __delete__(self, owner: Any) -> None:
        self.__get__(owner)
        values: dict[Any, Any] = self.values if id(owner) in self.objects else vars(owner)
        if values.pop(id(owner) if values is self.values else self._name, _ABSENT) is _ABSENT:
            raise AttributeError(self._name)


class ReadRecorder:
    """Record, in one run of forward, of the places that it reads before it writes them.

    Args:
        writes: the writes of an earlier run.
    """

    def __init__(self, writes: Iterable[Write]) -> None:
        self._writes = list(writes)
        self._made: dict[int, Any] = {}
        self._attributes: dict[tuple[type, str], _Attribute] = {}

    def begin(self, reached: ReachableState) -> None:
        """Replace the containers and attributes that are written to by recording ones.

        Args:
            reached: the state before the run, which must be restored after it.
        """
        self._attributes = {}
        wanted = {id(w.holder.value): w.holder for w in self._writes if type(w.holder.value) in _CLASSES}
        self._made = {key: _noting(holder) for key, holder in wanted.items()}
        for holder in reached.holders:
            self._replace_parts(holder)
        for write in self._writes:
            if isinstance(write, KeysWritten) and write.owner is not write.holder.value:
                self._stand_for(write)

    def _replace_parts(self, holder: Holder[Any]) -> None:
        if not isinstance(holder, (Named, Items)):
            return
        made = self._made.get(id(holder.value))
        if isinstance(holder, Named):
            named = {k: self._made.get(id(v), v) for k, v in holder.before.items()}
            if made is not None:
                dict.update(made, named)
            elif any(named[k] is not v for k, v in holder.before.items()):
                holder.write(named)
        else:
            items = [self._made.get(id(v), v) for v in holder.before]
            if made is not None:
                made.extend(items)
                made.first = items
            elif any(a is not b for a, b in zip(items, holder.before, strict=True)):
                holder.write(items)

    def _stand_for(self, write: KeysWritten) -> None:
        owner = write.holder.value
        for name in (*write.sets, *write.gone):
            kind = type(owner)
            key = (kind, name)
            if key not in self._attributes:
                attribute = _Attribute(name, getattr(kind, name, _ABSENT))
                try:
                    had = vars(kind).get(name, _ABSENT)
                    setattr(kind, name, attribute)
                except TypeError:
                    continue
                attribute.had = had  # type: ignore[attr-defined]
                self._attributes[key] = attribute
            attribute = self._attributes[key]
            attribute.objects.add(id(owner))
            values = vars(owner)
            if name in values:
                attribute.values[id(owner)] = values.pop(name)

    def end(self) -> None:
        """Remove the properties."""
        for (kind, name), attribute in self._attributes.items():
            had = attribute.had  # type: ignore[attr-defined]
            if had is _ABSENT:
                delattr(kind, name)
            else:
                setattr(kind, name, had)

    def unread(self) -> tuple[WriteOnlyState, frozenset[int]]:
        """Return the places that were written but not read before, and the ids of those that were cleared."""
        names: dict[int, frozenset[str]] = {}
        containers: set[int] = set()
        cleared: set[int] = set()
        alive: list[Any] = []
        for write in self._writes:
            owner = write.owner
            alive.append(owner)
            made = self._made.get(id(owner))
            if isinstance(write, ItemsWritten) and made is not None:
                if not made.read and _is_used(made):
                    containers.add(id(owner))
                if made.cleared:
                    cleared.add(id(owner))
            elif isinstance(write, KeysWritten) and made is not None and not made.read:
                if made.cleared:
                    containers.add(id(owner))
                    cleared.add(id(owner))
                else:
                    names[id(owner)] = frozenset(k for k in write.sets if k in made.written)
            elif isinstance(write, KeysWritten) and made is None:
                names[id(owner)] = frozenset(self._first_set(write))
        kept = {key: found for key, found in names.items() if found}
        return WriteOnlyState(kept, frozenset(containers), tuple(alive)), frozenset(cleared)

    def _first_set(self, write: KeysWritten) -> Iterator[str]:
        owner = write.holder.value
        for name in write.sets:
            attribute = self._attributes.get((type(owner), name))
            if attribute is not None and id(owner) in attribute.written:
                yield name
