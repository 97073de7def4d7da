"""In-place maps: the outputs and gradients of a Function that share memory with its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar, overload

from torch2ort.errors import RegistryError
from torch2ort.pythonop.registry._table import FunctionClass, Table, key_of

_C = TypeVar("_C", bound=FunctionClass)


@dataclass(frozen=True, slots=True)
class InplaceMap:
    """Memory that outputs and gradients of a Function share with its inputs.

    Attributes:
        forward: output position -> position, among all arguments of ``apply``, of the input whose memory
            it is.
        backward: position of an input gradient, among all arguments of ``apply`` -> position of the
            output gradient whose memory it is.
    """

    forward: Mapping[int, int]
    backward: Mapping[int, int]


inplace_maps: Table[InplaceMap] = Table("register_inplace_map", "an in-place map")


@overload
def register_inplace_map(
    function: str | FunctionClass,
    *,
    forward: Mapping[int, int] | None = None,
    backward: Mapping[int, int] | None = None,
    override: bool = False,
) -> None: ...
@overload
def register_inplace_map(
    *,
    forward: Mapping[int, int] | None = None,
    backward: Mapping[int, int] | None = None,
    override: bool = False,
) -> Callable[[_C], _C]: ...
def register_inplace_map(
    function: str | FunctionClass | None = None,
    *,
    forward: Mapping[int, int] | None = None,
    backward: Mapping[int, int] | None = None,
    override: bool = False,
) -> Callable[[_C], _C] | None:
    """Declare memory that a Function passes on, which saves the copies that would separate it.

    Args:
        function: its qualified name, or the class. If it is omitted, a decorator for the class is returned.
        forward: output position -> position, among all arguments of ``apply``, of the input whose memory
            the output is.
        backward: position of an input gradient -> position of the output gradient whose memory it is.
        override: whether to replace an entry of the same name.

    Raises:
        RegistryError: ``function`` is not a Function, a position is not an integer of at least 0, two outputs
            claim one input, or the name has a map already.

    A map that the Function's run contradicts raises :class:`torch2ort.InplaceMapError`, at export or in the
    first run.
    """
    declared = InplaceMap(_positions(forward, "forward"), _positions(backward, "backward"))
    if not declared.forward and not declared.backward:
        raise RegistryError(
            "register_inplace_map: the map is empty; give forward={output: argument}, "
            "backward={argument: output} or both"
        )

    def register(cls: _C) -> _C:
        _add(cls, declared, override)
        return cls

    if function is None:
        return register
    _add(function, declared, override)
    return None


def _add(function: str | FunctionClass, declared: InplaceMap, override: bool) -> None:
    name, cls = key_of(function, inplace_maps.verb)
    inplace_maps.add(name, cls, declared, override=override)


def _positions(given: Mapping[int, int] | None, which: str) -> Mapping[int, int]:
    if given is None:
        return MappingProxyType({})
    if not isinstance(given, Mapping):
        raise RegistryError(
            f"register_inplace_map: expected {which} as a dict of positions such as {{0: 0}}, got {given!r}"
        )
    for pair in given.items():
        if any(type(position) is not int or position < 0 for position in pair):
            raise RegistryError(
                f"register_inplace_map: {which}={dict(given)!r} is no map of positions; expected whole "
                f"numbers from 0 up, such as {{0: 0}}"
            )
    if len(set(given.values())) != len(given):
        raise RegistryError(
            f"register_inplace_map: {which}={dict(given)!r} gives the same memory to two; expected every "
            f"value once"
        )
    return MappingProxyType(dict(given))
