"""Arguments of ONNX's operators: tensors, and sizes, which are Python numbers.

ONNX computes sizes in tensors (``Shape``, ``Gather``, ``Concat``, ``Reshape``). In PyTorch such a size would
be data, on which a trace cannot depend. So a result of ``Shape``, or a small constant of int64, is a number,
or a list of numbers for a tensor of rank 1, as long as the operators between allow it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from torch2ort import UnsupportedOperatorError

Number: TypeAlias = Any  # int, float, bool, or torch's symbol for one
Value: TypeAlias = Any  # a tensor, a number, or a list of numbers


def is_host(*values: Value) -> bool:
    """Return True if all values are numbers or lists of numbers."""
    return not any(isinstance(value, torch.Tensor) for value in values)


def numbers(value: Value, what: str) -> list[Number]:
    """Return the numbers in a list, or a number as a list of one.

    Raises:
        UnsupportedOperatorError: they are in a tensor, whose values are known only while the graph runs.
    """
    if isinstance(value, torch.Tensor):
        raise UnsupportedOperatorError(
            f"{what} depends on values in a tensor; it has to be a constant, or come from sizes"
        )
    return list(value) if isinstance(value, (list, tuple)) else [value]


def number(value: Value, what: str) -> Number:
    """Return a single number.

    Raises:
        UnsupportedOperatorError: it is in a tensor.
    """
    return numbers(value, what)[0]


def tensor(value: Value, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return a value as a tensor; sizes become int64, as in ONNX."""
    if isinstance(value, torch.Tensor):
        return value
    device = None if like is None else like.device
    if isinstance(value, (list, tuple)) and any(isinstance(one, torch.SymInt) for one in value):
        return torch.stack([torch.scalar_tensor(one, dtype=torch.int64, device=device) for one in value])
    if isinstance(value, torch.SymInt):
        return tensor([value], like)[0]
    whole = isinstance(value, (list, tuple)) and not any(isinstance(one, (bool, float)) for one in value)
    # Also for a list without elements.
    return torch.tensor(value, dtype=torch.int64 if whole else None, device=device)


def tensors(*values: Value) -> list[torch.Tensor]:
    """Return all values as tensors on one device."""
    like = next((value for value in values if isinstance(value, torch.Tensor)), None)
    return [tensor(value, like) for value in values]


def by_number(function: Callable[..., Number], *values: Value) -> Value:
    """Call a function with numbers, elementwise for lists, and with single numbers repeated."""
    lists = [value for value in values if isinstance(value, (list, tuple))]
    if not lists:
        return function(*values)
    length = max(map(len, lists))
    if length == 0 or any(len(one) == 0 for one in lists):
        return []

    def at(value: Value, i: int) -> Number:
        if not isinstance(value, (list, tuple)):
            return value
        return value[0] if len(value) == 1 else value[i]

    return [function(*(at(value, i) for value in values)) for i in range(length)]


def positive(axis: int, rank: int) -> int:
    """Return an axis counted from the front."""
    return axis + rank if axis < 0 else axis


def axes_of(axes: Value, rank: int) -> list[int]:
    """Return axes counted from the front; all of them where none are given."""
    if axes is None:
        return list(range(rank))
    return [positive(int(axis), rank) for axis in numbers(axes, "axes")]


def refuse_unless(holds: bool, what: str) -> None:
    """Raise an error for a variant of an operator that is not supported.

    Raises:
        UnsupportedOperatorError: `holds` is False.
    """
    if not holds:
        raise UnsupportedOperatorError(f"{what}; export the model without it, or give the torch.nn.Module")


def product(values: Sequence[Number]) -> Number:
    """Return the product of numbers."""
    result: Number = 1
    for value in values:
        result = result * value
    return result
