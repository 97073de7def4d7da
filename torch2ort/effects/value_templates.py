"""How a Python value that holds tensors of a trace is made anew from the tensors of a run."""

from __future__ import annotations

import collections
import enum
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torch2ort import io_schema
from torch2ort.errors import SchemaError
from torch2ort.graph.scalar_inputs import Number, ReadInPythonError

# What is the same in each call, whoever made it.
PLAIN = (
    bool, bytes, complex, enum.Enum, float, int, np.generic, str, type, type(None), torch.Size, torch.device,
    torch.dtype, torch.layout, types.BuiltinFunctionType, types.ModuleType, range, slice,
)  # fmt: skip
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class UnmadeError(Exception):
    """A value cannot be made anew; the message is what it is."""


class Recipe:
    """One value."""

    def make(self, tensors: Sequence[torch.Tensor], made: dict[int, Any]) -> Any:
        """The value of a run.

        Args:
            tensors: what the run gives.
            made: containers of this run, by number: one that stands in two places stays one.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Taken(Recipe):
    """A tensor of the run.

    Attributes:
        index: its position.
    """

    index: int

    def make(self, tensors: Sequence[torch.Tensor], made: dict[int, Any]) -> Any:
        """See :meth:`Recipe.make`."""
        return tensors[self.index]


@dataclass(frozen=True)
class Same(Recipe):
    """A value that is the same in each call.

    Attributes:
        value: the value.
    """

    value: Any

    def make(self, tensors: Sequence[torch.Tensor], made: dict[int, Any]) -> Any:
        """See :meth:`Recipe.make`."""
        return self.value


@dataclass(frozen=True)
class _Container(Recipe):
    """A list, dict, deque, tuple or set that forward made.

    Attributes:
        number: tells the containers of one call apart.
        start: makes it empty; ``None`` for one that cannot be filled later.
        keys: of a dict.
        parts: what is in it.
        join: puts the parts in, or together.
    """

    number: int
    start: Callable[[], Any] | None
    keys: tuple[Any, ...]
    parts: list[Recipe]
    join: Callable[..., Any]

    def make(self, tensors: Sequence[torch.Tensor], made: dict[int, Any]) -> Any:
        """See :meth:`Recipe.make`."""
        if self.number in made:
            return made[self.number]
        if self.start is not None:
            made[self.number] = self.start()
        parts = [part.make(tensors, made) for part in self.parts]
        if self.start is None:
            made[self.number] = self.join(parts)
        elif self.keys:
            self.join(made[self.number], zip(self.keys, parts, strict=True))
        else:
            self.join(made[self.number], parts)
        return made[self.number]


@dataclass(frozen=True)
class _Nested(Recipe):
    """Nested data of other classes, as io_schema takes it apart."""

    number: int
    schema: io_schema.Schema
    indices: tuple[int, ...]

    def make(self, tensors: Sequence[torch.Tensor], made: dict[int, Any]) -> Any:
        """See :meth:`Recipe.make`."""
        if self.number not in made:
            made[self.number] = io_schema.unflatten([tensors[i] for i in self.indices], self.schema)
        return made[self.number]


class Recipes:
    """Writes down how values are made.

    Args:
        was_there: whether a value is older than the call.

    Attributes:
        place: where the next value stands, for people.
        tensors: what a run must give, in order.
        places: of the tensors.
        constants: whether some value is no tensor.
    """

    def __init__(self, was_there: Callable[[Any], bool]) -> None:
        self._was_there = was_there
        self.tensors: list[torch.Tensor] = []
        self.place = ""
        self.places: list[str] = []
        self.constants = False
        self._recipes: dict[int, Recipe] = {}
        self._alive: list[Any] = []

    def of(self, value: Any) -> Recipe:
        """The recipe of ``value``.

        Raises:
            UnmadeError: there is none.
        """
        if type(value) is Number:
            # One that stands for an argument: each value has a graph of its own, then.
            raise ReadInPythonError
        if isinstance(value, _SYMBOLS):
            raise UnmadeError("a size that varies")
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, PLAIN) or self._was_there(value):
            self.constants = True
            return Same(value)
        known = self._recipes.get(id(value))
        if known is None:
            self._alive.append(value)
            known = self._made(value)
        return known

    def _tensor(self, value: torch.Tensor) -> Recipe:
        if type(value) in (torch.Tensor, torch.nn.Parameter) and self._was_there(value):
            return Same(value)
        known = self._recipes.get(id(value))
        if known is None:
            known = self._recipes[id(value)] = self._take(value)
        return known

    def _take(self, value: torch.Tensor) -> Taken:
        self.tensors.append(value)
        self.places.append(self.place)
        return Taken(len(self.tensors) - 1)

    def _made(self, value: Any) -> Recipe:
        kind, number = type(value), len(self._alive)
        if kind in _FILLED:
            start: Any = kind
            fill: Any = getattr(kind, "update" if issubclass(kind, dict) else "extend")
            if kind is collections.deque:
                length = value.maxlen
                start = lambda: collections.deque(maxlen=length)  # noqa: E731
            elif kind is collections.defaultdict:
                factory = value.default_factory
                start = lambda: collections.defaultdict(factory)  # noqa: E731
            is_dict = issubclass(kind, dict)
            keys = tuple(value) if is_dict else ()
            if any(not isinstance(key, PLAIN) and not self._was_there(key) for key in keys):
                raise UnmadeError(f"a {kind.__name__} with keys of its own")
            recipe = _Container(number, start, keys, [], fill)
            self._recipes[id(value)] = recipe
            recipe.parts.extend(map(self.of, value.values() if is_dict else value))
            return recipe
        if kind in (tuple, set, frozenset):
            parts = [self.of(item) for item in value]
            recipe = self._recipes[id(value)] = _Container(number, None, (), parts, kind)
            return recipe
        if isinstance(value, types.FunctionType) and value.__closure__ is None:
            self.constants = True
            return Same(value)
        return self._nested(value, number)

    def _nested(self, value: Any, number: int) -> Recipe:
        try:
            tensors, schema = io_schema.flatten(value)
        except SchemaError as error:
            raise UnmadeError(f"a {type(value).__qualname__}") from error
        indices = []
        for tensor in tensors:
            recipe = self._tensor(tensor)
            if isinstance(recipe, Same):
                recipe = self._take(tensor)
            assert isinstance(recipe, Taken)
            indices.append(recipe.index)
        self.constants = True
        recipe = self._recipes[id(value)] = _Nested(number, schema, tuple(indices))
        return recipe


_FILLED = (list, dict, collections.OrderedDict, collections.defaultdict, collections.deque)
