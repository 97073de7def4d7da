"""Functions of torch that return memory of their argument, although their schema says otherwise.

torch.export relies on the schema: a write to the result would not reach the argument, and a result that is
the argument would be a copy.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

import torch

_DROPOUTS: Final = (torch.nn.functional.dropout, torch.dropout, torch.dropout_)
_SPLITS: Final[dict[Any, Any]] = {
    torch.unsafe_chunk: torch.chunk,
    torch.Tensor.unsafe_chunk: torch.chunk,
    torch.unsafe_split: torch.split,
    torch.Tensor.unsafe_split: torch.split,
    torch.unsafe_split_with_sizes: torch.split_with_sizes,
    torch.Tensor.unsafe_split_with_sizes: torch.split_with_sizes,
}


def replacement_for(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return a function that replaces ``func`` and declares its result as an alias; else ``None``."""
    if func in _DROPOUTS and _drops_nothing(*args, **kwargs):
        return _argument
    split = _SPLITS.get(func)
    return None if split is None or not args else functools.partial(_parts, split)


def _drops_nothing(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
) -> bool:
    """Return True if PyTorch returns the tensor itself; False for a ``p`` that it refuses."""
    if not 0 <= p <= 1:
        return False
    count = input.numel()
    return p == 0 or not training or not train or (isinstance(count, int) and count == 0)


def _argument(input: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return input


def _parts(split: Any, input: torch.Tensor, sizes: Any, dim: int = 0) -> tuple[torch.Tensor, ...]:
    """Return each part as a separate view: views that an operator made together cannot be written to."""
    parts = []
    start: Any = 0
    for part in split(input, sizes, dim):
        parts.append(input.narrow(dim, start, part.shape[dim]))
        start = start + part.shape[dim]
    return tuple(parts)
