"""Numbers among a call's arguments that vary from call to call, as inputs of one graph.

A graph contains numbers as constants. A number that differs in a later call becomes an input of the next
graph, if forward only multiplies, adds, subtracts or divides tensors by it: there an input computes the same
as a constant. A :class:`Number` represents it while forward is traced, and refuses all other uses, as Python
code that reads a number may do anything with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torch2ort import io_schema

# Larger integers are not exact in float64.
_LARGEST = 2**53
_DTYPES = (torch.float32, torch.float64)
_FUNCTIONS = frozenset(
    getattr(holder, name)
    for holder, names in (
        (torch, ("mul", "multiply", "add", "sub", "subtract", "div", "divide", "true_divide")),
        (torch.Tensor, ("mul", "multiply", "add", "sub", "subtract", "div", "divide", "true_divide")),
        (torch.Tensor, ("__mul__", "__rmul__", "__add__", "__radd__", "__sub__", "__rsub__")),
        (torch.Tensor, ("__truediv__", "__rtruediv__", "__rdiv__")),
    )
    for name in names
    if hasattr(holder, name)
)


class ReadInPythonError(BaseException):
    """Forward uses a number in a way that an input of a graph does not support.

    Not an Exception, so that the model's own code does not catch it.
    """


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise ReadInPythonError


def _operator(name: str) -> Callable[[Number, Any], Any]:
    def operate(self: Number, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return getattr(torch.Tensor, name)(other, self)
        raise ReadInPythonError

    return operate


class Number:
    """The representation of an ``int`` or ``float`` argument in a trace.

    Args:
        kind: the type of the number.
        value: the graph's input, without dimensions.
    """

    def __init__(self, kind: type, value: torch.Tensor) -> None:
        object.__setattr__(self, "_number", (kind, value))

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The type of the number, for ``isinstance``."""
        kind: type = object.__getattribute__(self, "_number")[0]
        return kind

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Apply the function to a floating-point tensor and the input, cast to the tensor's dtype."""
        tensors = [a for a in args if type(a) is not Number]
        if function not in _FUNCTIONS or kwargs or len(args) != 2 or len(tensors) != 1:
            raise ReadInPythonError
        (tensor,) = tensors
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _DTYPES:
            raise ReadInPythonError
        return function(*(_value_of(a).to(tensor.dtype) if type(a) is Number else a for a in args))

    __mul__ = _operator("__rmul__")
    __rmul__ = _operator("__mul__")
    __add__ = _operator("__radd__")
    __radd__ = _operator("__add__")
    __sub__ = _operator("__rsub__")
    __rsub__ = _operator("__sub__")
    __truediv__ = _operator("__rtruediv__")
    __rtruediv__ = _operator("__truediv__")
    __getattr__ = __setattr__ = __delattr__ = _refuse


for _name in (
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__bool__", "__index__"),
    *("__int__", "__float__", "__complex__", "__round__", "__trunc__", "__floor__", "__ceil__", "__abs__"),
    *("__neg__", "__pos__", "__invert__", "__pow__", "__rpow__", "__mod__", "__rmod__", "__floordiv__"),
    *("__rfloordiv__", "__divmod__", "__rdivmod__", "__matmul__", "__rmatmul__", "__and__", "__rand__"),
    *("__or__", "__ror__", "__xor__", "__rxor__", "__lshift__", "__rlshift__", "__rshift__", "__rrshift__"),
    *("__str__", "__repr__", "__format__", "__len__", "__iter__", "__getitem__", "__contains__", "__call__"),
    *("__reduce__", "__reduce_ex__", "__copy__", "__deepcopy__", "__array__", "__dir__"),
):
    setattr(Number, _name, _refuse)


def _value_of(number: Any) -> torch.Tensor:
    value: torch.Tensor = object.__getattribute__(number, "_number")[1]
    return value


def with_numbers(tensors: Sequence[torch.Tensor], numbers: Collection[int]) -> list[Any]:
    """Return ``tensors`` with a :class:`Number` in place of those at these positions."""
    return [
        Number(float if t.is_floating_point() else int, t) if i in numbers else t
        for i, t in enumerate(tensors)
    ]


def with_values(tensors: Sequence[torch.Tensor], numbers: Collection[int]) -> list[Any]:
    """Return ``tensors`` with the number itself in place of those at these positions."""
    return [t.item() if i in numbers else t for i, t in enumerate(tensors)]


@dataclass
class _Met:
    """The numbers that occurred in calls of one form."""

    first: dict[int, Any]
    varying: set[int] = field(default_factory=set)
    refused: bool = False


class Numbers:
    """The numbers that vary among all calls of a model."""

    def __init__(self) -> None:
        self._met: dict[Hashable, _Met] = {}

    def lift(
        self, tensors: list[torch.Tensor], schema: io_schema.Schema
    ) -> tuple[list[torch.Tensor], io_schema.Schema, frozenset[int]]:
        """Return the call with its varying numbers as tensors, and their positions among the tensors."""
        numbers = {i: value for i, value in schema.constants.items() if type(value) in (int, float)}
        if not numbers:
            return tensors, schema, frozenset()
        met = self._met.setdefault(schema.form, _Met(numbers))
        met.varying.update(i for i, value in numbers.items() if _differ(value, met.first[i]))
        large = any(isinstance(numbers[i], int) and abs(numbers[i]) > _LARGEST for i in met.varying)
        if not met.varying or met.refused or large:
            return tensors, schema, frozenset()
        return io_schema.constants_to_tensors(tensors, schema, {i: _tensor(numbers[i]) for i in met.varying})

    def refuse(self, schema: io_schema.Schema) -> None:
        """Record that calls of this form cannot have their numbers as inputs."""
        self._met[schema.form].refused = True


def _differ(a: Any, b: Any) -> bool:
    return repr(a) != repr(b)  # -0.0 and 0.0 differ, nan and nan do not


def _tensor(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
