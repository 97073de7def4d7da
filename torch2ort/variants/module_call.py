"""How a call of an ORTModule was written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch2ort.capture.sample_call import Call


class Direct(NamedTuple):
    """How a call was written whose arguments are tensors alone: another one like it needs no binding.

    Attributes:
        positional: how many arguments are passed by position.
        names: of those passed by keyword, in the order of the call.
        order: per tensor that a graph is fed with, which of the arguments it is.
    """

    positional: int
    names: tuple[str, ...]
    order: tuple[int, ...]

    @classmethod
    def of(
        cls, args: Sequence[Any], kwargs: Mapping[str, Any], bound: Mapping[str, Any], call: Call
    ) -> Direct | None:
        """How a call was written; ``None`` if it passes anything but tensors, or one of them twice.

        Args:
            args: of the call.
            kwargs: of the call.
            bound: both by name.
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
        """What a graph is fed with, if this call is written so; whether it is tensors is not looked at."""
        if len(args) != self.positional or tuple(kwargs) != self.names:
            return None
        passed = [*args, *kwargs.values()]
        return [passed[position] for position in self.order]


# What a default that a call leaves alone may be: nothing of these changes.
_SETTLED = frozenset({type(None), bool, int, float, str})


def _laid_open(bound: Mapping[str, Any]) -> list[Any]:
    """The arguments, those of ``*args`` one by one."""
    return [x for value in bound.values() for x in (value if type(value) is tuple else (value,))]
