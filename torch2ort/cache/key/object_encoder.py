"""Encoding of values in a key: by the encoder of their type, or else by class and attributes."""

from __future__ import annotations

import contextlib
import decimal
import functools
import types
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torch2ort.cache.key.constant_bytes import atom, form, words
from torch2ort.cache.key.container_encoders import set_
from torch2ort.cache.key.encoder_table import EXACT, INHERITED
from torch2ort.cache.key.fully_read_types import is_read_whole
from torch2ort.cache.key.functions_and_classes import Definitions
from torch2ort.cache.key.global_names import check_pure
from torch2ort.cache.key.key_builder import Walk
from torch2ort.cache.key.packages import package_of_module
from torch2ort.cache.key.tensor_encoders import array, tensor
from torch2ort.cache.key.write_only_state import NOTHING, WriteOnlyState
from torch2ort.pythonop.abstract_run.opaque_objects import last_results, steps_unseen

if TYPE_CHECKING:
    from torch2ort.cache.key.encoder_table import Encode

# hash() of the object itself, in transformers' GenerationConfig; it differs between processes.
_HASHES = words("_original_object_hash")


class ObjectEncoder:
    """Encoder of any value that a model's code can reach.

    Args:
        walk: the walk that receives the bytes.
        unhooked: ids of the modules whose own hooks run outside of the graph.
        unread: places that do not count.

    Attributes:
        walk, unhooked, unread: as given.
        fed: ids of tensors among the attributes of modules: inputs of a graph, whatever their values.
        definitions: encoder of functions and classes.
    """

    def __init__(self, walk: Walk, unhooked: Collection[int] = (), unread: WriteOnlyState = NOTHING) -> None:
        self.walk: Walk = walk
        self.unread = unread
        self.unhooked = unhooked
        self.fed: set[int] = set()
        self.definitions: Definitions = Definitions(walk, self.write)
        self._are_arguments = False

    def write(self, value: Any) -> None:
        """Write a value, or a reference to it.

        Raises:
            Unkeyable: it contains something that cannot be compared between processes.
        """
        data = atom(value)
        if data is not None:
            self.walk.write(data)
            return
        kind = type(value)
        if kind is tuple:
            # A tuple never changes, so the guard on the place that contains it is enough.
            self.walk.write(b"(%d" % len(value))
            for item in value:
                self.write(item)
        elif kind is set or kind is frozenset:
            set_(self, value)
        elif id(value) in self.walk.weights:
            self.weight(value)
            # Tracing does not recognize the weight in this place, and makes a constant of it.
            if not (self._are_arguments or self.walk.write_reference(value)):
                tensor(self, value)
        elif not self.walk.write_reference(value):
            self.walk.write(b"<")
            _encoder_of(value)(self, value)
            self.walk.write(b">")

    def write_arguments(self, arguments: Any) -> None:
        """Write the arguments of a call, in which tensors are inputs of the graph."""
        self._are_arguments = True
        try:
            self.write(arguments)
        finally:
            self._are_arguments = False

    def all(self, *values: Any) -> None:
        """Write several values."""
        for value in values:
            self.write(value)

    def guard_value(self, read: Callable[[], Any], value: Any) -> None:
        """Guard the place of ``value`` by the result of ``read``."""
        self.walk.guards.value(read, value, self.walk.place)

    def weight(self, tensor: torch.Tensor) -> None:
        """Write a reference to a weight of the model."""
        self.walk.write(form(b"w", self.walk.weights[id(tensor)].encode()))

    def instance(self, value: Any) -> None:
        """Write an object by its class, its attributes and its slots."""
        kind = type(value)
        if kind.__module__ in ("datetime", "decimal", "fractions", "uuid", "ipaddress"):
            if isinstance(value, decimal.Context):
                self.guard_value(lambda: repr(value), value)
            self.walk.atom(repr(value))
            return
        if isinstance(value, np.generic):
            self.walk.atom("scalar")
            array(self, np.asarray(value))
            return
        if isinstance(value, np.dtype):
            self.walk.atom(repr(value))
            return
        if steps_unseen(value):
            self.walk.refuse_unseen(
                f"a {kind.__qualname__} advances without exposing its position. Keep the values in a list, "
                f"or pass them as arguments",
                value,
            )
            return
        if _hides_state(kind):
            self.walk.refuse(
                f"a {kind.__module__}.{kind.__qualname__} keeps its state outside of Python, where it "
                f"cannot be compared between processes",
                value,
            )
        package = package_of_module(kind.__module__)
        if package is not None:
            self.walk.check(check_pure, package, kind)
        self.walk.guards.type_of(value, self.walk.place)
        self.definitions.class_(kind)
        self.attributes(value)

    def attributes(self, value: Any) -> None:
        """Write the attributes and slots of an object."""
        kind: type = type(value)
        whole = is_read_whole(kind)
        own = getattr(value, "__dict__", None)
        own, skipped, place = {} if own is None else own, _HASHES, f"a {kind.__name__}"
        if isinstance(own, dict):
            skipped = skipped | self.unread.of(own) | _uncounted(kind, own)
            self.walk.guards.attributes(own, place, skipped=skipped)
        for name in sorted(own, key=str):
            if name not in skipped:
                if whole and isinstance(own, dict):
                    self.walk.guards.entry(own, name, f"the attribute {name!r} of {place}")
                self.attribute(str(name), own[name], counts=whole)
        for cls in kind.__mro__:
            for name, member in vars(cls).items():
                if isinstance(member, types.MemberDescriptorType):
                    self.walk.guards.attribute(value, name, self.walk.place)
                    with contextlib.suppress(AttributeError):  # a slot that was never assigned
                        content = member.__get__(value)
                        self.attribute(name, content, counts=whole)

    def attribute(self, name: str, value: Any, *, counts: bool = False) -> None:
        """Write an attribute.

        Args:
            name: name of the attribute.
            value: its value.
            counts: True if code that is not inspected may read it; otherwise reached code must read its name.
        """
        if counts:
            self.walk.atom(name)
            self.write(value)
            return
        data = atom(value)
        if data is None:
            self.walk.attribute(name, functools.partial(self.write, value))
        else:  # a plain value can always be written
            self.walk.atom(name)
            self.walk.write(data)
            self.walk.note(name, value)


def _encoder_of(value: Any) -> Encode:
    exact = EXACT.get(type(value))
    if exact is not None:
        return exact
    found = (encode for kinds, encode in INHERITED if isinstance(value, kinds))
    return next(found, lambda encoder, value: encoder.instance(value))


def _hides_state(kind: type) -> bool:
    """Return True if an instance's memory is larger than its attributes and slots need."""
    slots = sum(
        isinstance(member, types.MemberDescriptorType)
        for cls in kind.__mro__
        for member in vars(cls).values()
    )
    words = slots + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    pointer = object.__basicsize__ // 2
    return kind.__basicsize__ > object.__basicsize__ + words * pointer


def _uncounted(kind: type, attributes: Collection[str]) -> frozenset[str]:
    """Return the attributes that count in no key: last results, or all outside of ``counted_in_keys``."""
    package = package_of_module(kind.__module__)
    own = package is not None and package.name == "torch2ort"
    counted = getattr(kind, "counted_in_keys", None) if own else None
    return last_results(kind) if counted is None else frozenset(attributes) - counted
