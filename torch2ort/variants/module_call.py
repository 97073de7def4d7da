"""The form of an ORTModule call: arguments by position and by keyword."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch2ort.capture.sample_call import Call


class TensorCallForm(NamedTuple):
    """The form of a call whose arguments are tensors alone: another call of this form needs no binding.

    Attributes:
        positional: number of arguments passed by position.
        names: names of the arguments passed by keyword, in the order of the call.
        order: for each tensor that is fed to a graph, its position among the arguments.
    """

    positional: int
    names: tuple[str, ...]
    order: tuple[int, ...]

    @classmethod
    def of(
        cls, args: Sequence[Any], kwargs: Mapping[str, Any], bound: Mapping[str, Any], call: Call
    ) -> TensorCallForm | None:
        """Return the form of a call; ``None`` if it passes anything but tensors, or one of them twice.

        Args:
            args: the call's positional arguments.
            kwargs: the call's keyword arguments.
            bound: both, by name.
            call: the call.
        """
        passed = [*args, *kwargs.values()]
        where = {id(value): position for position, value in enumerate(passed)}
        if not len(where) == len(passed) == len(call.tensors):
            return None
        if any(id(value) not in where and type(value) not in _SETTLED for value in _laid_open(bound)):
            return None  # a default that may be written to
        if any(id(tensor) not in where for tensor in call.tensors):
            return None
        return cls(len(args), tuple(kwargs), tuple(where[id(tensor)] for tensor in call.tensors))

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """Return the feeds of a graph for a call of this form, else ``None``; their types are not checked."""
        if len(args) != self.positional or tuple(kwargs) != self.names:
            return None
        passed = [*args, *kwargs.values()]
        return [passed[position] for position in self.order]


# The types of defaults that a call may use: they are immutable.
_SETTLED = frozenset({type(None), bool, int, float, str})


def _laid_open(bound: Mapping[str, Any]) -> list[Any]:
    """Return the arguments, with those of ``*args`` as single arguments."""
    return [x for value in bound.values() for x in (value if type(value) is tuple else (value,))]
