"""The table of decompositions, filled by the modules beside this one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch

from torch2ort.kernels.derivatives import DERIVATIVES
from torch2ort.symbolics._torch_private import OpOverload
from torch2ort.symbolics.policy import is_large

Decomposition: TypeAlias = Callable[..., Any]
_F = TypeVar("_F", bound=Decomposition)

_always: dict[OpOverload, Decomposition] = {}
_for_gradients: dict[OpOverload, Decomposition] = {}


def decomposes(*operators: OpOverload, only_for_gradients: bool = True) -> Callable[[_F], _F]:
    """Register a function as the decomposition of ``operators``.

    Args:
        operators: overloads whose arguments the function takes.
        only_for_gradients: whether ONNX has an operator of its own that does for inference.
    """

    def register(function: _F) -> _F:
        table = _for_gradients if only_for_gradients else _always
        table.update(dict.fromkeys(operators, function))
        return function

    return register


def decomposition_table(*, training: bool) -> dict[OpOverload, Decomposition]:
    """Decompositions to apply before the translation of a program."""
    if not training:
        return dict(_always)
    table = {**_always, **_for_gradients}
    return {t: _unless_large(f) if t in DERIVATIVES else f for t, f in table.items()}


def _unless_large(function: Decomposition) -> Decomposition:
    """Leave an operator whole where PyTorch's kernel will do it."""

    def decompose(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented if is_large(self) else function(self, *args, **kwargs)

    return decompose
