"""Python's computations with numbers that a model reads out of tensors, as a text in a graph.

Python's own arithmetic raises errors where tensors contain infinity, and its integers are unbounded. So a
formula is computed in Python, as a whole: only its result must be representable in a tensor.
"""

from __future__ import annotations

import functools
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch2ort.errors import ModelLoadError


def _same_size(one: int, other: int) -> bool:
    if one != other:
        raise RuntimeError(
            f"two sizes that depend on values in tensors are {one} and {other}, and the graph of the model "
            f"is for equal ones, with nothing broadcast along them. Select tensors of one size with one "
            f"mask, or put the part of the model that takes both into a torch.autograd.Function"
        )
    return True


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{
        f"operator.{function.__name__}": function
        for function in (
            *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod),
            *(operator.pow, operator.neg, operator.pos, operator.abs),
            *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
            *(operator.and_, operator.or_),
        )
    },
    "math.ceil": math.ceil,
    "math.floor": math.floor,
    "same_size": _same_size,
    "sym_float": torch.sym_float,
    "sym_ite": torch.sym_ite,
    "sym_max": torch.sym_max,
    "sym_min": torch.sym_min,
    "sym_not": torch.sym_not,
}
_NAMES: Mapping[Any, str] = {function: name for name, function in _FUNCTIONS.items()}
_READS: Mapping[str, Callable[..., Callable[[Sequence[torch.Tensor]], bool | int | float]]] = {
    "number": lambda i: lambda tensors: tensors[i].item(),
    "size": lambda i, dim: lambda tensors: tensors[i].shape[dim],
}
_TYPES: Mapping[torch.dtype, type] = {torch.bool: bool, torch.int64: int, torch.float64: float}


def name_of(function: Any) -> str | None:
    """Return the name of a function of numbers in a formula; ``None`` for an unsupported one."""
    return _NAMES.get(function)


def computed_number(numbers: Sequence[torch.Tensor], dtype: torch.dtype, formula: str) -> torch.Tensor:
    """Return the result of a formula as a tensor.

    Args:
        numbers: tensors; those from which a number is read have one element.
        dtype: of the result: bool, int64 or float64.
        formula: JSON: ``[name, *operands]``, where an operand is a formula, a number, ``{"number": i}`` for
            that of the i-th tensor, or ``{"size": [i, d]}`` for its size along dimension d.

    Raises:
        ArithmeticError, RuntimeError, TypeError: Python raises it, or a tensor of the type cannot represent
        the result.
        ModelLoadError: the formula is invalid.
    """
    made = _value(_decoded(formula), numbers)
    if type(made) is not _TYPES[dtype]:
        raise TypeError(
            f"a number that the model computes from one that it reads out of a tensor is {made!r}, of type "
            f"{type(made).__name__}, and its graph was traced for {_TYPES[dtype].__name__}; compute it with "
            f"tensors, as x.max() without .item()"
        )
    if isinstance(made, int) and not -(1 << 63) <= made < 1 << 63:
        raise OverflowError(
            f"a number that the model computes from one that it reads out of a tensor is {made}, and a graph "
            f"holds integers of 64 bits; compute it with floating-point numbers"
        )
    return torch.tensor(made, dtype=dtype, device=numbers[0].device)


@functools.lru_cache(maxsize=4096)
def _decoded(formula: str) -> Any:
    try:
        return _checked(json.loads(formula))
    except (ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"not a formula of numbers: {formula!r} ({error})") from None


def _checked(formula: Any) -> Any:
    if isinstance(formula, list):
        name, *operands = formula
        return (_FUNCTIONS[name], *map(_checked, operands))
    if isinstance(formula, dict):
        ((kind, content),) = formula.items()
        return _READS[kind](*content if isinstance(content, list) else [content])
    if not isinstance(formula, (bool, int, float)):
        raise ValueError(f"{formula!r} is not an operand")
    return formula


def _value(formula: Any, numbers: Sequence[torch.Tensor]) -> Any:
    if isinstance(formula, tuple):
        function, *operands = formula
        return function(*(_value(operand, numbers) for operand in operands))
    return formula(numbers) if callable(formula) else formula
