"""The table of translations, filled by the other modules of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch2ort._torch import onnx_exporter as private
from torch2ort.program.target import Target
from torch2ort.symbolics.registered import user_translations

_F = TypeVar("_F", bound=Callable[..., Any])
# torch2ort's own translations; users' registered ones take precedence.
OWN: dict[Any, Callable[..., Any]] = {}
# Additional translations of exported graphs, for operators that other graphs decompose.
EXPORTED: dict[Any, Callable[..., Any]] = {}


def translates(
    *operators: Any, table: dict[Any, Callable[..., Any]] = OWN, of_complex: bool = False
) -> Callable[[_F], _F]:
    """Register a function as the translation of ``operators``.

    Args:
        operators: overloads whose arguments the function accepts.
        table: the table to add it to.
        of_complex: True for a translation of complex tensors alone, which a graph has as tensors of pairs.
    """

    def register(function: _F) -> _F:
        vars(function)[private.OF_COMPLEX] = of_complex
        table.update(dict.fromkeys(operators, function))
        return function

    return register


def translation_table(target: Target) -> dict[Any, Callable[..., Any]]:
    """Return the translations by operator: users' registered ones, then the target's, then torch2ort's."""
    own = {**OWN, **(EXPORTED if target.is_exported else {}), **target.translations}
    return {**own, **user_translations(own)}
