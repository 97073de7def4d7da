"""Validation of the shapes and dtypes that a shape inferer returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch

from torch2ort.errors import ShapeInferenceError
from torch2ort.pythonop.abstract_run.tensor_rollback import TensorRollback
from torch2ort.pythonop.registry import Inferer
from torch2ort.pythonop.site import PythonOpSite
from torch2ort.sizes import expressions as sizes

Dim: TypeAlias = "int | sympy.Expr | None"


@dataclass(frozen=True, slots=True)
class InferredTensor:
    """Shape and dtype that an inferer returned for one tensor output.

    Attributes:
        shape: a number, an expression, or ``None`` (unknown) per dimension; ``None`` for an unknown rank.
        dtype: element type.
    """

    shape: tuple[Dim, ...] | None
    dtype: torch.dtype


def infer_outputs(
    inferer: Inferer,
    node: PythonOpSite,
    shapes: Sequence[Sequence[int | sympy.Expr] | None],
    dtypes: Sequence[torch.dtype],
) -> tuple[InferredTensor, ...]:
    """Return the shapes and dtypes that ``inferer`` computes for the outputs of a call.

    Args:
        inferer: the registered inferer; it gets copies of the lists.
        node: the call.
        shapes: one entry per tensor argument.
        dtypes: one entry per tensor argument.

    Raises:
        ShapeInferenceError: the result is not a pair of lists of shapes and dtypes.
    """
    given = [None if s is None else list(s) for s in shapes]
    with TensorRollback():
        returned = inferer(node, given, list(dtypes))
    name = node.func_name
    if not _is_list(returned) or len(returned) != 2 or not all(map(_is_list, returned)):
        raise ShapeInferenceError(
            f"{name}: the shape inferer returned {returned!r}; expected a pair of lists, the shapes and the "
            f"dtypes of the tensor outputs"
        )
    found, types = returned
    if len(found) != len(types):
        raise ShapeInferenceError(
            f"{name}: the shape inferer returned {len(found)} shapes and {len(types)} dtypes; expected one "
            f"of each per tensor output"
        )
    return tuple(
        InferredTensor(_shape(name, i, s), _dtype(name, i, t))
        for i, (s, t) in enumerate(zip(found, types, strict=True))
    )


def _shape(name: str, output: int, shape: Any) -> tuple[Dim, ...] | None:
    if shape is None:
        return None
    if not _is_list(shape):
        raise ShapeInferenceError(
            f"{name}: the shape inferer returned {shape!r} as the shape of output {output}; expected a list "
            f"of dimensions, or None for an unknown rank"
        )
    return tuple(_dim(name, output, axis, dim) for axis, dim in enumerate(shape))


def _dim(name: str, output: int, axis: int, dim: Any) -> Dim:
    if dim is None:
        return None
    found: Any = None
    if isinstance(dim, int) and not isinstance(dim, bool):
        found = sympy.Integer(dim)
    elif isinstance(dim, str):
        try:
            found = sizes.parse(dim)
        except ValueError:
            found = None
    elif isinstance(dim, sympy.Expr):
        found = dim.xreplace({s: sizes.symbol(str(s)) for s in dim.free_symbols})
    if found is None or found.is_negative or (found.is_integer is False and found.is_number):
        raise ShapeInferenceError(
            f"{name}: the shape inferer returned {dim!r} for dimension {axis} of output {output}; expected "
            f"a whole "
            f"number from 0 up, a sympy expression, a name or expression of names such as '2*batch', or "
            f"None for an unknown size"
        )
    return int(found) if found.is_Integer else found


def _dtype(name: str, output: int, dtype: Any) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    raise ShapeInferenceError(
        f"{name}: the shape inferer returned {dtype!r} as the dtype of output {output}; expected a "
        f"torch.dtype such as torch.float32"
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))
