"""Nested data for the tests: classes, a generator, and comparisons that do not depend on optree."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import optree
import torch
from hypothesis import strategies as st
from transformers.utils import ModelOutput

Point = namedtuple("Point", ["x", "y"])


class Typed(NamedTuple):
    left: Any
    right: Any = None


@dataclasses.dataclass
class Batch:
    ids: Any
    mask: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: Any


@dataclasses.dataclass
class Derived:
    """Has a field that is not an argument, and an attribute that is not a field."""

    parts: Any
    extra: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        self.note = "made by __post_init__"


@dataclasses.dataclass
class Output(ModelOutput):
    logits: Any = None
    hidden: Any = None


class Attributes(dict):
    pass


class Stack(list):
    pass


class Pair(tuple):
    pass


class Box:
    """A class that only optree can open."""

    def __init__(self, items: Sequence[Any], label: Any = None) -> None:
        self.items = list(items)
        self.label = label


class GlobalBox(Box):
    pass


class Color(enum.Enum):
    RED = 1
    BLUE = 2


def register(cls: type, namespace: Any) -> None:
    optree.register_pytree_node(
        cls,
        lambda box: (box.items, box.label),
        lambda label, items: cls(items, label),
        namespace=namespace,
    )


register(Box, "torch2ort")
register(GlobalBox, optree.registry.__GLOBAL_NAMESPACE)


# --- the generator


def _tensor(dtype: torch.dtype, rank: int) -> torch.Tensor:
    return torch.zeros((1,) * rank, dtype=dtype)


tensors = st.builds(_tensor, st.sampled_from([torch.float32, torch.int64, torch.bool]), st.integers(0, 2))
constants = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(), max_size=3)
)
plain_keys = st.one_of(
    st.text("ab_1", max_size=3),
    st.integers(-2, 2),
    st.booleans(),
    st.none(),
    st.floats(),
    st.binary(max_size=2),
    st.sampled_from([Color.RED, Color.BLUE, torch.float32]),
)
keys = st.one_of(plain_keys, st.tuples(plain_keys, plain_keys))
labels = st.one_of(st.none(), constants, st.tuples(constants, constants), st.lists(constants, max_size=2))


def _containers(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    few = st.lists(items, max_size=3)
    mapping = st.dictionaries(keys, items, max_size=3)
    named = st.dictionaries(st.sampled_from(["logits", "hidden", "more"]), items, max_size=3)
    pairs = st.tuples(items, items)
    ints = st.lists(st.integers(-(2**62), 2**62), max_size=3)
    return st.one_of(
        few,
        few.map(tuple),
        mapping,
        mapping.map(OrderedDict),
        st.builds(defaultdict, st.sampled_from([None, list, int]), mapping),
        st.builds(deque, few, st.sampled_from([None, 3, 5])),
        pairs.map(lambda pair: Point(*pair)),
        pairs.map(lambda pair: Typed(*pair)),
        pairs.map(lambda pair: Batch(*pair)),
        items.map(Frozen),
        items.map(Derived),
        named.map(output_of),
        mapping.map(Attributes),
        mapping.map(UserDict),
        mapping.map(MappingProxyType),
        few.map(Stack),
        few.map(Pair),
        few.map(UserList),
        ints.map(torch.Size),
        st.builds(Box, few, labels),
        st.builds(GlobalBox, few),
        st.just(None).map(lambda _: torch.ones(2, 2).max(dim=0)),
    )


def output_of(items: Mapping[str, Any]) -> Output:
    output = Output(logits=torch.zeros(1))
    for key, value in items.items():
        output[key] = value
    return output


nested = st.recursive(st.one_of(tensors, tensors, constants), _containers, max_leaves=12)
"""Any data that can be flattened, and whose schema has a JSON form."""


# --- comparisons


def children(value: Any) -> list[tuple[Any, Any]] | None:
    """Return what a container holds, each with its key; None for a leaf."""
    if isinstance(value, torch.Tensor | str) or value is None:
        return None
    if isinstance(value, Box):
        return list(enumerate(value.items))
    if isinstance(value, Mapping):
        return [(key, value[key]) for key in value]
    if dataclasses.is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, Sequence):
        return list(enumerate(value))
    return None


def same_constant(a: Any, b: Any) -> bool:
    """Return True if two constants, keys or labels have the same type and value."""
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same_constant, a, b))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return bool(a == b)


def same(a: Any, b: Any, same_tensor: Callable[[torch.Tensor, torch.Tensor], bool]) -> bool:
    """Return True if two structures are equal in every class, key, constant and detail."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return same_tensor(a, b)
    details = ("default_factory", "maxlen", "label", "note")
    if any(not same_constant(getattr(a, name, None), getattr(b, name, None)) for name in details):
        return False
    inner_a, inner_b = children(a), children(b)
    if inner_a is None or inner_b is None:
        return inner_a is inner_b and same_constant(a, b)
    return len(inner_a) == len(inner_b) and all(
        same_constant(key_a, key_b) and same(item_a, item_b, same_tensor)
        for (key_a, item_a), (key_b, item_b) in zip(inner_a, inner_b, strict=True)
    )


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a structure, depth first."""
    if isinstance(value, torch.Tensor):
        yield value
    for _, item in children(value) or ():
        yield from tensors_in(item)
