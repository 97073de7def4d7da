"""Exporters: ONNX operators that replace a Function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar, get_args, overload

from torch2ort.errors import RegistryError
from torch2ort.pythonop.registry._table import FunctionClass, Table, check_callable, key_of

GradientSource: TypeAlias = Literal["engine", "function"]
ExporterCallable: TypeAlias = Callable[..., Any]
_F = TypeVar("_F", bound=ExporterCallable)


@dataclass(frozen=True, slots=True)
class Exporter:
    """Conversion of a Function to ONNX operators.

    Attributes:
        call: ``call(g, *arguments)`` returns graph values, or ``None``.
        gradient: ``"engine"`` or ``"function"``, see :func:`register_exporter`.
    """

    call: ExporterCallable
    gradient: GradientSource


exporters: Table[Exporter] = Table("register_exporter", "an exporter")


@overload
def register_exporter(
    function: str | FunctionClass, *, gradient: GradientSource = "engine", override: bool = False
) -> Callable[[_F], _F]: ...
@overload
def register_exporter(
    function: str | FunctionClass,
    exporter: _F,
    *,
    gradient: GradientSource = "engine",
    override: bool = False,
) -> _F: ...
def register_exporter(
    function: str | FunctionClass,
    exporter: _F | None = None,
    *,
    gradient: GradientSource = "engine",
    override: bool = False,
) -> _F | Callable[[_F], _F]:
    """Map a Function to ONNX operators.

    Args:
        function: its qualified name, or the class.
        exporter: ``exporter(g, *arguments)``, called once for each call of the Function in an exported
            model. ``g`` builds nodes, see :class:`torch2ort.GraphBuilder`; tensor arguments are
            :class:`torch2ort.GraphValue`, the others their Python values. It returns a value, or a tuple of
            values for several outputs; or ``None``, and the call stays a ``PythonOp``. If it is omitted, a
            decorator is returned.
        gradient: the source of the gradient in training. ``"engine"``: registered gradients, see
            :func:`register_gradient`, if all operators of the call have one, otherwise the Function's own
            ``backward``. ``"function"``: always that ``backward``.
        override: whether to replace an entry of the same name.

    Returns:
        ``exporter``, or a decorator.

    Raises:
        RegistryError: ``function`` is not a Function, ``exporter`` is not callable, ``gradient`` is unknown,
            or the name has an exporter already.
    """
    name, cls = key_of(function, exporters.verb)
    if gradient not in get_args(GradientSource):
        raise RegistryError(
            f"register_exporter: gradient={gradient!r} for '{name}'; expected one of "
            f"{', '.join(map(repr, get_args(GradientSource)))}"
        )

    def register(call: _F) -> _F:
        check_callable(call, exporters.verb, "an exporter")
        exporters.add(name, cls, Exporter(call, gradient), override=override)
        return call

    return register if exporter is None else register(exporter)
