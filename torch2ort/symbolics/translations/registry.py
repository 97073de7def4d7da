"""The table of translations, filled by the modules beside this one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from torch2ort.symbolics.registered import user_translations

_F = TypeVar("_F", bound=Callable[..., Any])
# torch2ort's own; what users register goes before them.
OWN: dict[Any, Callable[..., Any]] = {}


def translates(*operators: Any) -> Callable[[_F], _F]:
    """Register a function as the translation of ``operators``."""

    def register(function: _F) -> _F:
        OWN.update(dict.fromkeys(operators, function))
        return function

    return register


def translation_table(
    instead: Mapping[Any, Callable[..., Any]] = MappingProxyType({}),
) -> dict[Any, Callable[..., Any]]:
    """Translations by operator: those that users registered, then those of a target, then our own.

    Args:
        instead: the target's.
    """
    own = {**OWN, **instead}
    return {**own, **user_translations(own)}
