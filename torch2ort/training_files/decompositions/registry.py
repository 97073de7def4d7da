"""The table of decompositions of a step, filled by the other modules of this folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch2ort.program.decomposition_table import Table, decomposes

_F = TypeVar("_F", bound=Callable[..., Any])
STEP: Table = {}


def derives(*operators: Any) -> Callable[[_F], _F]:
    """Register a function as the decomposition of ``operators`` in a file of a step."""
    return decomposes(*operators, table=STEP)
