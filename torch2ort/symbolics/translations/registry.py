"""The table of translations, filled by the modules beside this one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch2ort._torch import onnx_exporter as private
from torch2ort.program.target import Target
from torch2ort.symbolics.registered import user_translations

_F = TypeVar("_F", bound=Callable[..., Any])
# torch2ort's own; what users register goes before them.
OWN: dict[Any, Callable[..., Any]] = {}
# Those of graphs that are exported besides, of what others take apart.
EXPORTED: dict[Any, Callable[..., Any]] = {}


def translates(
    *operators: Any, table: dict[Any, Callable[..., Any]] = OWN, of_complex: bool = False
) -> Callable[[_F], _F]:
    """Register a function as the translation of ``operators``.

    Args:
        operators: overloads whose arguments the function takes.
        table: where.
        of_complex: whether it is for complex tensors alone, which a graph has as tensors of pairs.
    """

    def register(function: _F) -> _F:
        vars(function)[private.OF_COMPLEX] = of_complex
        table.update(dict.fromkeys(operators, function))
        return function

    return register


def translation_table(target: Target) -> dict[Any, Callable[..., Any]]:
    """Translations by operator: those that users registered, then those of a target, then our own."""
    own = {**OWN, **(EXPORTED if target.is_exported else {}), **target.translations}
    return {**own, **user_translations(own)}
