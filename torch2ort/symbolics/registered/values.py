"""Values of a graph as a user's exporter sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import sympy
import torch

from torch2ort.pythonop import ONNX_TYPES
from torch2ort.sizes import expressions as sizes

_DTYPES = {number: dtype for dtype, number in ONNX_TYPES.items()}


class GraphValue:
    """A value of the ONNX graph that is being built: an input of an exporter, or a result of ``g.op``.

    It is a placeholder and holds no data. Pass it to ``g.op``.
    """

    __slots__ = ("_names", "_owner", "_value")

    def __init__(self, value: ir.Value, owner: object, names: Mapping[str, sympy.Expr]) -> None:
        self._value = value
        self._owner = owner
        self._names = names

    @property
    def dtype(self) -> torch.dtype | None:
        """Element type; ``None`` where the operator has no rule for it."""
        return None if self._value.dtype is None else _DTYPES.get(int(self._value.dtype))

    @property
    def shape(self) -> list[int | sympy.Expr | None] | None:
        """Sizes: numbers, or expressions over the names of ``dynamic_shapes``; ``None`` for unknown ones."""
        if self._value.shape is None:
            return None
        return [_size(dim, self._names) for dim in self._value.shape]

    def __bool__(self) -> bool:
        raise TypeError(
            "a graph value has no truth value: it holds no data while the model is exported; use "
            "g.op('Where', ...) to choose by data, or g.op('Equal', ...) to compare"
        )

    def __repr__(self) -> str:
        shape = (
            "?" if self.shape is None else f"[{', '.join('?' if d is None else str(d) for d in self.shape)}]"
        )
        return f"GraphValue({self._value.name or 'unnamed'}, {self.dtype}, {shape})"


def _size(dim: int | ir.SymbolicDim, names: Mapping[str, sympy.Expr]) -> int | sympy.Expr | None:
    if isinstance(dim, int):
        return dim
    if dim.value is None:
        return None
    try:
        size: Any = sizes.parse(dim.value)
    except ValueError:
        return None
    return size.xreplace({s: names[s.name] for s in size.free_symbols if s.name in names})
