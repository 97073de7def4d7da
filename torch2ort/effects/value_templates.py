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


class NotReproducibleError(Exception):
    """A value cannot be constructed again; the message describes it."""


class ValueTemplate:
    """Construction of one value."""

    def make(self, tensors: Sequence[torch.Tensor], made: dict[int, Any]) -> Any:
        """Return the value for a run.

        Args:
            tensors: the tensors that the run returned.
            made: containers of this run by number, so that one container in two places is created once.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class RunTensor(ValueTemplate):
    """A tensor of the run.

    Attributes:
        index: its position.
    """

    index: int

    def make(self, tensors: Sequence[torch.Tensor], made: dict[int, Any]) -> Any:
        """See :meth:`ValueTemplate.make`."""
        return tensors[self.index]


@dataclass(frozen=True)
class ConstantValue(ValueTemplate):
    """A value that is the same in each call.

    Attributes:
        value: the value.
    """

    value: Any

    def make(self, tensors: Sequence[torch.Tensor], made: dict[int, Any]) -> Any:
        """See :meth:`ValueTemplate.make`."""
        return self.value


@dataclass(frozen=True)
class _Container(ValueTemplate):
    """A list, dict, deque, tuple or set that forward made.

    Attributes:
        number: identifies the container among those of one call.
        start: creates it empty; ``None`` for one that cannot be filled later.
        keys: keys of a dict.
        parts: templates of its contents.
        join: adds the parts, or creates the container from them.
    """

    number: int
    start: Callable[[], Any] | None
    keys: tuple[Any, ...]
    parts: list[ValueTemplate]
    join: Callable[..., Any]

    def make(self, tensors: Sequence[torch.Tensor], made: dict[int, Any]) -> Any:
        """See :meth:`ValueTemplate.make`."""
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
class _Nested(ValueTemplate):
    """Nested data of other classes, by their schema."""

    number: int
    schema: io_schema.Schema
    indices: tuple[int, ...]

    def make(self, tensors: Sequence[torch.Tensor], made: dict[int, Any]) -> Any:
        """See :meth:`ValueTemplate.make`."""
        if self.number not in made:
            made[self.number] = io_schema.unflatten([tensors[i] for i in self.indices], self.schema)
        return made[self.number]


class ValueTemplates:
    """The templates of values.

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
        self._templates: dict[int, ValueTemplate] = {}
        self._alive: list[Any] = []

    def of(self, value: Any) -> ValueTemplate:
        """Return the template of ``value``.

        Raises:
            NotReproducibleError: there is none.
        """
        if type(value) is Number:
            # A Number replaces an argument: then each of its values needs its own graph.
            raise ReadInPythonError
        if isinstance(value, _SYMBOLS):
            raise NotReproducibleError("a size that varies")
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, PLAIN) or self._was_there(value):
            self.constants = True
            return ConstantValue(value)
        known = self._templates.get(id(value))
        if known is None:
            self._alive.append(value)
            known = self._make(value)
        return known

    def _tensor(self, value: torch.Tensor) -> ValueTemplate:
        if type(value) in (torch.Tensor, torch.nn.Parameter) and self._was_there(value):
            return ConstantValue(value)
        known = self._templates.get(id(value))
        if known is None:
            known = self._templates[id(value)] = self._take(value)
        return known

    def _take(self, value: torch.Tensor) -> RunTensor:
        self.tensors.append(value)
        self.places.append(self.place)
        return RunTensor(len(self.tensors) - 1)

    def _make(self, value: Any) -> ValueTemplate:
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
                raise NotReproducibleError(f"a {kind.__name__} with keys of its own")
            template = _Container(number, start, keys, [], fill)
            self._templates[id(value)] = template
            template.parts.extend(map(self.of, value.values() if is_dict else value))
            return template
        if kind in (tuple, set, frozenset):
            parts = [self.of(item) for item in value]
            template = self._templates[id(value)] = _Container(number, None, (), parts, kind)
            return template
        if isinstance(value, types.FunctionType) and value.__closure__ is None:
            self.constants = True
            return ConstantValue(value)
        return self._make_nested(value, number)

    def _make_nested(self, value: Any, number: int) -> ValueTemplate:
        try:
            tensors, schema = io_schema.flatten(value)
        except SchemaError as error:
            raise NotReproducibleError(f"a {type(value).__qualname__}") from error
        indices = []
        for tensor in tensors:
            template = self._tensor(tensor)
            if isinstance(template, ConstantValue):
                template = self._take(tensor)
            assert isinstance(template, RunTensor)
            indices.append(template.index)
        self.constants = True
        template = self._templates[id(value)] = _Nested(number, schema, tuple(indices))
        return template


_FILLED = (list, dict, collections.OrderedDict, collections.defaultdict, collections.deque)
