"""Encoders of containers, and of the memory behind the buffer protocol."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any

from torch2ort.cache.key.constant_bytes import atom
from torch2ort.cache.key.key_builder import Unkeyable
from torch2ort.pythonop.abstract_run.object_snapshot import built_in

if TYPE_CHECKING:
    from torch2ort.cache.key.object_encoder import ObjectEncoder


def items(encoder: ObjectEncoder, values: Any) -> None:
    """Write a list or a deque."""
    if id(values) in encoder.unread.containers:
        return
    if isinstance(values, list):
        encoder.walk.guards.sequence(values, encoder.walk.place)
    else:
        _guard_ids(encoder, values)
    encoder.walk.atom((type(values).__name__, getattr(values, "maxlen", None)))
    encoder.all(*values)


def mapping(encoder: ObjectEncoder, value: Any) -> None:
    """Write a dict or a view of one."""
    if id(value) in encoder.unread.containers:
        return
    skipped = encoder.unread.of(value)
    if isinstance(value, dict):
        encoder.walk.guards.items(value, encoder.walk.place, skipped=skipped)
    else:
        encoder.walk.guards.value(
            lambda: [(id(k), id(v)) for k, v in value.items()], value, encoder.walk.place
        )
    for key, item in value.items():
        if not (skipped and key in skipped):
            encoder.all(key, item)


def _guard_ids(encoder: ObjectEncoder, values: Iterable[Any]) -> None:
    encoder.guard_value(lambda: [id(value) for value in values], values)


def memory(encoder: ObjectEncoder, value: Any) -> None:
    """Write the bytes of a buffer, and guard them."""
    view = memoryview(value)
    encoder.walk.atom((view.format, bytes(view)))
    encoder.guard_value(lambda: bytes(memoryview(value)), value)


def set_(encoder: ObjectEncoder, values: Any) -> None:
    """Write a set, in an order that is the same in each process."""
    base = built_in(values)
    if base is set:
        encoder.guard_value(lambda: [id(value) for value in set.__iter__(values)], values)
    members = list(base.__iter__(values))
    try:
        tokens = {_token(value): value for value in members}
    except Unkeyable as reason:
        encoder.walk.refuse(str(reason), values)
        encoder.all(*members)
        return
    if len(tokens) < len(members):
        encoder.walk.refuse(
            "a set holds several things of one name, in another order in each process", values
        )
    encoder.walk.write(b"{%d" % len(members))
    encoder.all(*(tokens[token] for token in sorted(tokens)))


def subclass_of_container(encoder: ObjectEncoder, value: Any) -> None:
    """Write an instance of a subclass of a container or a plain type."""
    encoder.definitions.class_(type(value))
    # The base's own methods read it, because a class may override them to show other content.
    place, guards = encoder.walk.place, encoder.walk.guards
    guards.type_of(value, place)
    if isinstance(value, collections.OrderedDict):
        guards.value(lambda: [id(key) for key in collections.OrderedDict.keys(value)], value, place)
        guards.items(value, place)
        encoder.all(*collections.OrderedDict.items(value))
    elif isinstance(value, dict):
        skipped = encoder.unread.of(value)
        if id(value) not in encoder.unread.containers:
            guards.items(value, place, skipped=skipped)
            encoder.all(*(item for item in dict.items(value) if item[0] not in skipped))
    elif isinstance(value, list):
        guards.sequence(value, place)
        encoder.all(*list.__iter__(value))
    elif isinstance(value, tuple):
        encoder.all(*tuple.__iter__(value))
    elif isinstance(value, (set, frozenset)):
        set_(encoder, value)
    else:
        encoder.walk.write(_plain_part(value))
    if isinstance(value, collections.defaultdict):
        encoder.write(value.default_factory)
    encoder.attributes(value)


def _token(value: Any) -> bytes:
    """Return the sort key of a set's member, which is the same in each process."""
    data = atom(value)
    if data is not None:
        return data
    if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        return f"{value.__module__}.{value.__qualname__}".encode()
    raise Unkeyable(f"a set of {type(value).__qualname__} objects has another order in each process")


def _plain_part(value: Any) -> bytes:
    exact: dict[type, Callable[[Any], Any]] = {
        str: str.__str__, int: int.__int__, float: float.__float__, bytes: lambda v: bytes(memoryview(v))
    }  # fmt: skip
    data = next(atom(convert(value)) for base, convert in exact.items() if isinstance(value, base))
    assert data is not None
    return data
