"""Construction of Python values from the tensors of a run, for values that contain tensors of a trace."""

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

# Types whose values are the same in each call, wherever they were created.
PLAIN = (
    bool, bytes, complex, enum.Enum, float, int, np.generic, str, type, type(None), torch.Size, torch.device,
    torch.dtype, torch.layout, types.BuiltinFunctionType, types.ModuleType, range, slice,
)  # fmt: skip
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class UnmadeError(Exception):
    """A value cannot be constructed again; the message describes it."""


class Recipe:
    """Construction of one value."""

    def make(self, tensors: Sequence[torch.Tensor], made: dict[int, Any]) -> Any:
        """Return the value for a run.

        Args:
            tensors: the tensors that the run returned.
            made: containers of this run by number, so that one container in two places is created once.
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
        number: identifies the container among those of one call.
        start: creates it empty; ``None`` for one that cannot be filled later.
        keys: keys of a dict.
        parts: recipes of its contents.
        join: adds the parts, or creates the container from them.
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
    """Nested data of other classes, by their schema."""

    number: int
    schema: io_schema.Schema
    indices: tuple[int, ...]

    def make(self, tensors: Sequence[torch.Tensor], made: dict[int, Any]) -> Any:
        """See :meth:`Recipe.make`."""
        if self.number not in made:
            made[self.number] = io_schema.unflatten([tensors[i] for i in self.indices], self.schema)
        return made[self.number]


class Recipes:
    """The recipes of values.

    Args:
        was_there: returns True if a value is older than the call.

    Attributes:
        place: place of the next value, for messages.
        tensors: the tensors that a run must return, in order.
        places: places of the tensors.
        constants: True if some value is no tensor.
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
        """Return the recipe of ``value``.

        Raises:
            UnmadeError: there is none.
        """
        if type(value) is Number:
            # A Number replaces an argument: then each of its values needs its own graph.
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
