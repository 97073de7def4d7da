"""Operators of torch with a translation that a user registered."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import sympy

from torch2ort._torch import onnx_exporter as private
from torch2ort._torch.dispatch import output_count
from torch2ort.errors import ExportError
from torch2ort.program.target import Target
from torch2ort.pythonop import ONNX_TYPES
from torch2ort.pythonop.registry import overloads, symbolics
from torch2ort.symbolics.registered.builder import GraphBuilder
from torch2ort.symbolics.registered.exporter_calls import commit, returned_values, run_user

_DTYPES = {ir.DataType(number): dtype for dtype, number in ONNX_TYPES.items()}


@dataclass(frozen=True)
class _Setting:
    """Settings of the translation in progress."""

    names: Mapping[str, sympy.Expr]
    target: Target


_setting: contextvars.ContextVar[_Setting | None] = contextvars.ContextVar(
    "torch2ort_translation", default=None
)


@contextlib.contextmanager
def translating(names: Mapping[str, sympy.Expr], target: Target) -> Iterator[None]:
    """Set the names and the target that registered translations use.

    Args:
        names: torch's symbols -> their names in the graph.
        target: the runtime of the graph.
    """
    token = _setting.set(_Setting(names, target))
    try:
        yield
    finally:
        _setting.reset(token)


def user_operators() -> frozenset[Any]:
    """Return every operator that has a registered translation."""
    return frozenset(_targets())


def user_translations(own: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return the registered translations, by operator.

    Args:
        own: torch2ort's translations, used where a registered one returns ``None``.
    """
    return {
        target: _translation(name, target, symbolics.entries()[name].value, own.get(target))
        for target, name in _targets().items()
    }


def _targets() -> dict[Any, str]:
    """Return operator -> its registered name; a single overload takes precedence over all of them."""
    names = sorted(symbolics.entries(), key=lambda name: "." in name.partition("::")[2])
    found = {target: name for name in names for target in overloads(name)}
    for name in found.values():
        symbolics.find(name)
    return found


def _translation(
    name: str, target: Any, call: Callable[..., Any], otherwise: Callable[..., Any] | None
) -> Callable[..., Any]:
    def translate(*arguments: Any, **keywords: Any) -> Any:
        setting = _setting.get()
        assert setting is not None, "translations run inside of translating()"
        builder = GraphBuilder(name, setting.names, setting.target)
        given = [_wrapped(builder, a) for a in arguments]
        named = {k: None if k == "dtype" and v == -1 else _wrapped(builder, v) for k, v in keywords.items()}
        returned = run_user(call, builder, given, named)
        if returned is None:
            default = otherwise or private.torchlib_translation(target)
            if default is None:
                raise ExportError(
                    f"{name}: its translation returned None, and nothing else translates {target}; return a "
                    f"graph value for every call"
                )
            return default(*arguments, **keywords)
        count = output_count(target)
        values = returned_values(builder, returned, name, "translation", count)
        values = commit(builder, values, _graph_values([*arguments, *keywords.values()]))
        return values[0] if count == 1 else values

    return translate


def _wrapped(builder: GraphBuilder, value: Any) -> Any:
    """Convert an argument for a user: graph values, torch's dtypes, and other Python values unchanged."""
    if isinstance(value, ir.Value):
        return builder.wrap(value)
    if isinstance(value, (list, tuple)):
        return [_wrapped(builder, v) for v in value]
    return _DTYPES.get(value, value) if isinstance(value, ir.DataType) else value


def _graph_values(arguments: Sequence[Any]) -> list[ir.Value]:
    found: list[ir.Value] = []
    for value in arguments:
        if isinstance(value, ir.Value):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _graph_values(value)
    return found
