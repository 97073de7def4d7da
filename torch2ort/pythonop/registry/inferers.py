"""Shape inferers: the shapes of a Function's outputs from those of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, overload

from torch2ort.pythonop.registry._table import FunctionClass, Table, check_callable, key_of

Inferer: TypeAlias = Callable[[Any, list[Any], list[Any]], Any]
_F = TypeVar("_F", bound=Inferer)

inferers: Table[Inferer] = Table("register_shape_inferer", "a shape inferer")


@overload
def register_shape_inferer(
    function: str | FunctionClass, *, override: bool = False
) -> Callable[[_F], _F]: ...
@overload
def register_shape_inferer(function: str | FunctionClass, inferer: _F, *, override: bool = False) -> _F: ...
def register_shape_inferer(
    function: str | FunctionClass, inferer: _F | None = None, *, override: bool = False
) -> _F | Callable[[_F], _F]:
    """Register a function that computes the shapes of a Function's outputs from those of its inputs.

    The same callable is used while the model is traced, so that operators after the Function see
    symbolic sizes, and on the ONNX graph.

    Args:
        function: the Function's qualified name, or the class.
        inferer: ``inferer(node, input_shapes, input_dtypes)``. ``node`` has ``func_name`` and ``arguments``
            (position -> Python value of the non-tensor ones). There is one shape and one dtype per tensor
            argument: a list of ``int | sympy.Expr`` (``None`` for an unknown rank), and a ``torch.dtype``.
            It returns the same two lists for the tensor outputs; a dimension may also be a ``str`` (a
            name, or an expression of names) or ``None`` (unknown). If it is omitted, a decorator is returned.
        override: whether to replace an entry of the same name.

    Returns:
        ``inferer``, or a decorator.

    Raises:
        RegistryError: ``function`` is not a Function, ``inferer`` is not callable, or the name has an
            inferer already.
    """
    name, cls = key_of(function, inferers.verb)

    def register(call: _F) -> _F:
        check_callable(call, inferers.verb, "a shape inferer")
        inferers.add(name, cls, call, override=override)
        return call

    return register if inferer is None else register(inferer)
