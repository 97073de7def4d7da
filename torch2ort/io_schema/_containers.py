"""Containers that optree treats as leaves and this package takes apart and rebuilds.

Optree knows tuple, list, namedtuple, struct sequence, dict, OrderedDict, defaultdict, deque and registered
classes. It does not open a dataclass, a ``ModelOutput`` or a subclass of dict. Registering such a class when
it is first met would take the registration away from its owner, so an instance is wrapped in
:class:`Adapted` instead, the only class that this package registers.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import optree

from torch2ort.io_schema._kv_caches import is_cache, join_cache, split_cache
from torch2ort.io_schema._leaves import CONSTANT_TYPES, UnsupportedError, exact, type_name

NAMESPACE: Final = "torch2ort"
"""The optree namespace in which a class can be registered for torch2ort alone."""

ADVICE: Final = (
    "Pass its tensors in a tuple, list or dict, or register its class: "
    f"optree.register_pytree_node(..., namespace={NAMESPACE!r})."
)

# The order of keys is part of a schema. The context stays open for the process: closed, optree sorts again.
_insertion_order = ExitStack()
_insertion_order.enter_context(optree.dict_insertion_ordered(True, namespace=NAMESPACE))

_MISSING: Final = object()


@dataclasses.dataclass(frozen=True, slots=True)
class Adapter:
    """The functions that take apart and rebuild instances of one family of classes.

    Attributes:
        kind: Name of the family in the JSON form of a schema.
        accepts: Returns whether a class belongs to the family.
        split: Returns an instance's children, the keys that lead to them, and one detail that the
            constructor needs besides (a factory, a length), or None.
        join: Builds an instance of a class from keys, detail and children.
        entry: optree's class for a step of a path through the container.
    """

    kind: str
    accepts: Callable[[type], bool]
    split: Callable[[Any], tuple[list[Any], tuple[Any, ...], Any]]
    join: Callable[[type, tuple[Any, ...], Any, Sequence[Any]], Any]
    entry: type[optree.PyTreeEntry]


@dataclasses.dataclass(frozen=True, slots=True)
class Adapted:
    """The parts of an instance, as the node that optree sees in its place."""

    kind: str
    cls: type
    keys: tuple[Any, ...]
    detail: Any
    children: tuple[Any, ...]


def adapt(value: Any) -> Adapted | None:
    """Take apart a container that optree does not know, or return None if `value` is not one.

    Args:
        value: Anything that optree treats as a leaf.

    Raises:
        UnsupportedError: `value` is a container, but its class provides no way to build an equal one.
    """
    cls = type(value)
    adapter = next((adapter for adapter in ADAPTERS.values() if adapter.accepts(cls)), None)
    if adapter is None:
        return None
    children, keys, detail = adapter.split(value)
    # A dataclass without attributes besides its fields is not rebuilt on trial, which would run its
    # __post_init__ again; nor is a cache, which consists of its attributes.
    if adapter.kind != "cache" and (adapter.kind != "dataclass" or _attributes(value).keys() - set(keys)):
        _check_rebuilt(value, adapter, children, keys, detail)
    return Adapted(adapter.kind, cls, keys, detail, tuple(children))


def _check_rebuilt(
    value: Any, adapter: Adapter, children: list[Any], keys: tuple[Any, ...], detail: Any
) -> None:
    """Raise UnsupportedError unless the class rebuilds `value` from its parts, with nothing lost."""
    cls = type(value)
    try:
        rebuilt = adapter.join(cls, keys, detail, children)
        new_children, new_keys, new_detail = adapter.split(rebuilt)
    except Exception as error:
        raise _not_rebuilt(cls, f"it raised {type(error).__name__}: {error}") from error
    same_items = len(new_children) == len(children) and all(map(_is, new_children, children))
    if not same_items or exact((type(rebuilt), new_keys, new_detail)) != exact((cls, keys, detail)):
        raise _not_rebuilt(cls, "it has other items then")
    attributes = _attributes(rebuilt)
    for name, attribute in _attributes(value).items():
        is_cached = isinstance(inspect.getattr_static(cls, name, None), functools.cached_property)
        if name not in attributes and not is_cached:
            raise _not_rebuilt(cls, f"its attribute {name!r} would be lost")
        if not _may_stand_for(attributes.get(name, attribute), attribute):
            raise _not_rebuilt(cls, f"its attribute {name!r} would change")


def _not_rebuilt(cls: type, reason: str) -> UnsupportedError:
    return UnsupportedError(f"a {type_name(cls)} cannot be rebuilt from its items: {reason}. {ADVICE}")


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an instance, from its ``__dict__`` and its slots."""
    slots = [vars(base).get("__slots__", ()) for base in type(value).__mro__]
    names = [name for found in slots for name in ((found,) if isinstance(found, str) else found)]
    held = {name: getattr(value, name, _MISSING) for name in names if name not in ("__dict__", "__weakref__")}
    return {name: item for name, item in held.items() if item is not _MISSING} | getattr(
        value, "__dict__", {}
    )


def _may_stand_for(rebuilt: Any, attribute: Any) -> bool:
    """Return True if the types, and of constants the values, are equal; __post_init__ may remake others."""
    if type(rebuilt) is not type(attribute):
        return False
    return type(attribute) not in CONSTANT_TYPES or exact(rebuilt) == exact(attribute)


def _is(a: object, b: object) -> bool:
    return a is b


# --- dataclasses


def _split_dataclass(value: Any) -> tuple[list[Any], tuple[Any, ...], Any]:
    # A field with init=False may not have been assigned yet.
    items = {field.name: getattr(value, field.name, _MISSING) for field in dataclasses.fields(value)}
    items = {name: item for name, item in items.items() if item is not _MISSING}
    return list(items.values()), tuple(items), None


def _join_dataclass(cls: Any, keys: tuple[Any, ...], detail: Any, children: Sequence[Any]) -> Any:
    items = dict(zip(keys, children, strict=True))
    arguments = _constructor_arguments(cls)
    if arguments is None or not arguments <= items.keys():
        rebuilt = cls.__new__(cls)
    else:
        # The constructor also runs __post_init__, which may set attributes that are not fields.
        rebuilt = cls(**{name: items[name] for name in arguments})
    for name, item in items.items():
        if getattr(rebuilt, name, _MISSING) is not item:
            object.__setattr__(rebuilt, name, item)  # a frozen dataclass refuses its own __setattr__
    return rebuilt


@functools.lru_cache(maxsize=256)
def _constructor_arguments(cls: type) -> frozenset[str] | None:
    """Return the fields that ``cls(**fields)`` accepts, or None if the constructor needs anything else."""
    names = frozenset(field.name for field in dataclasses.fields(cls) if field.init)
    try:
        parameters = inspect.signature(cls).parameters
    except ValueError:  # it is written in C
        return None
    needed = {
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    return names if needed <= names <= parameters.keys() else None


# --- dicts that are dataclasses, such as Hugging Face's ModelOutput


def _split_model_output(value: Any) -> tuple[list[Any], tuple[Any, ...], Any]:
    keys = tuple(value.keys())
    for name in (*keys, *(field.name for field in dataclasses.fields(value))):
        if getattr(value, name, None) is not dict.get(value, name):
            raise _not_rebuilt(type(value), f"its attribute {name!r} is not its item {name!r}")
    return [dict.get(value, key) for key in keys], keys, None


def _join_model_output(cls: Any, keys: tuple[Any, ...], detail: Any, children: Sequence[Any]) -> Any:
    # Its constructor guesses the items when there is one field only, and refuses additional keys.
    rebuilt = cls.__new__(cls)
    base = OrderedDict if issubclass(cls, OrderedDict) else dict
    for field in dataclasses.fields(cls):
        object.__setattr__(rebuilt, field.name, None)
    for key, item in zip(keys, children, strict=True):
        base.__setitem__(rebuilt, key, item)
        object.__setattr__(rebuilt, key, item)
    return rebuilt


# --- other mappings and sequences


def _split_mapping(value: Any) -> tuple[list[Any], tuple[Any, ...], Any]:
    keys = tuple(value)
    factory = value.default_factory if isinstance(value, defaultdict) else None
    return [value[key] for key in keys], keys, factory


def _join_mapping(cls: Any, keys: tuple[Any, ...], detail: Any, children: Sequence[Any]) -> Any:
    items = dict(zip(keys, children, strict=True))
    return cls(detail, items) if issubclass(cls, defaultdict) else cls(items)


def _split_sequence(value: Any) -> tuple[list[Any], tuple[Any, ...], Any]:
    children = list(value)
    return children, tuple(range(len(children))), value.maxlen if isinstance(value, deque) else None


def _join_sequence(cls: Any, keys: tuple[Any, ...], detail: Any, children: Sequence[Any]) -> Any:
    return cls(children, detail) if issubclass(cls, deque) else cls(children)


ADAPTERS: Final[dict[str, Adapter]] = {
    adapter.kind: adapter
    for adapter in (
        Adapter("cache", is_cache, split_cache, join_cache, optree.GetAttrEntry),
        Adapter(
            "model_output",
            lambda cls: issubclass(cls, dict) and dataclasses.is_dataclass(cls),
            _split_model_output,
            _join_model_output,
            optree.MappingEntry,
        ),
        Adapter(
            "dataclass",
            lambda cls: dataclasses.is_dataclass(cls) and not issubclass(cls, (list, tuple, deque)),
            _split_dataclass,
            _join_dataclass,
            optree.DataclassEntry,
        ),
        Adapter(
            "mapping",
            lambda cls: issubclass(cls, Mapping),
            _split_mapping,
            _join_mapping,
            optree.MappingEntry,
        ),
        Adapter(
            "sequence",
            lambda cls: issubclass(cls, Sequence) and not issubclass(cls, (str, bytes, bytearray)),
            _split_sequence,
            _join_sequence,
            optree.SequenceEntry,
        ),
    )
}
"""The families by name, in the order in which they are tried."""


def _split_adapted(node: Any) -> tuple[tuple[Any, ...], Any, tuple[Any, ...]]:
    return node.children, (node.kind, node.cls, node.keys, node.detail), node.keys


def _join_adapted(data: Any, children: Any) -> Any:
    kind, cls, keys, detail = data
    return ADAPTERS[kind].join(cls, keys, detail, children)


optree.register_pytree_node(Adapted, _split_adapted, _join_adapted, namespace=NAMESPACE)  # type: ignore[arg-type]
