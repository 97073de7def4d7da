"""The check of an index tensor: in a graph for training a call of Python, in any other ONNX operators.

Eager refuses what lies outside, each operator with an error of its own. ONNX counts negative indices from
the end, and ONNX Runtime has kernels that read whatever memory an index points to.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.autograd import Function

from torch2ort.errors import ModelLoadError
from torch2ort.kernels.functions import decode_call

# In front of the message of a condition that eager's Python code raises a ValueError for.
VALUE_ERROR = "torch2ort ValueError: "
CHECKED_INDEX = "torch2ort::CheckedIndex"
# What is a size only in name: numbers may be as large as there is memory for.
BOUNDLESS = 1 << 62


@dataclass(frozen=True, slots=True)
class Check:
    """Which numbers an index tensor may hold.

    Attributes:
        call: eager's operator, as :func:`torch2ort.kernels.functions.encode_call` writes it.
        index: number of the index tensor among the call's tensors.
        source: number of the tensor that is indexed; ``None`` if :attr:`size` says how large it is.
        dim: which dimension of it; ``None`` for all elements.
        size: the first number that is too large, where there is no :attr:`source`.
        low: the smallest number; ``None`` for minus the size.
        ignored: a number that is allowed too.
        exact: whether what reads the index does not look at it itself, in ONNX Runtime.
    """

    call: str
    index: int
    source: int | None
    dim: int | None
    size: int | None
    low: int | None
    ignored: int | None
    exact: bool

    def to_json(self) -> str:
        """The text that :func:`decode_check` turns back."""
        return json.dumps(asdict(self), sort_keys=True)


@functools.lru_cache(maxsize=4096)
def decode_check(text: str) -> Check:
    """The check that ``text`` describes.

    Raises:
        ModelLoadError: it describes none.
    """
    try:
        check = Check(**json.loads(text))
        tensors = decode_call(check.call).tensors
        numbers = (check.source, check.dim, check.size, check.low, check.ignored)
        if type(check.index) is not int or not all(n is None or type(n) is int for n in numbers):
            raise ValueError("a number is none")
        if not (0 <= check.index < tensors and -1 < (check.source or 0) < tensors):
            raise ValueError("a tensor's number is too large")
        if check.source is None and check.size is None:
            raise ValueError("nothing is indexed")
    except (ValueError, TypeError) as error:
        raise ModelLoadError(f"not the check of an index: {text!r} ({error})") from None
    return check


def are_inside(check: Check, index: torch.Tensor, sizes: Sequence[int]) -> bool:
    """Whether each number of an index tensor is allowed.

    Args:
        check: the numbers that are allowed.
        index: the index tensor.
        sizes: those of the tensor that is indexed; unread without :attr:`Check.source`.
    """
    if check.source is None:
        size = check.size or 0
    else:
        size = math.prod(sizes) if check.dim is None else sizes[check.dim]
    low = -size if check.low is None else check.low
    if _inside(index, low, size):
        return True
    return check.ignored is not None and _inside(index[index != check.ignored], low, size)


def refuse_index(text: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise what eager raises if an index lies outside.

    Args:
        text: describes a :class:`Check`.
        tensors: those of its call.
    """
    check = decode_check(text)
    if are_inside(check, tensors[check.index], () if check.source is None else tensors[check.source].shape):
        return
    # Eager's own operator raises eager's own error.
    try:
        decode_call(check.call)(tensors)
    except RuntimeError as error:
        if str(error).startswith(VALUE_ERROR):
            raise ValueError(str(error).removeprefix(VALUE_ERROR)) from None
        raise


def _inside(index: torch.Tensor, low: int, size: int) -> bool:
    if not index.numel():
        return True
    smallest, largest = torch.aminmax(index)
    return low <= int(smallest) and int(largest) < size


class IndexCheck(Function):
    """The same indices; eager's error if one lies outside."""

    @staticmethod
    def forward(ctx: Any, text: str, *tensors: torch.Tensor) -> torch.Tensor:
        """A copy of the index tensor.

        Args:
            ctx: the context.
            text: describes a :class:`Check`.
            tensors: those of its call.
        """
        index = tensors[decode_check(text).index]
        # While a graph is made, tensors are of a class that holds no numbers.
        if type(index) is torch.Tensor:
            refuse_index(text, tensors)
        result = index.clone(memory_format=torch.contiguous_format)
        ctx.mark_non_differentiable(result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, ...]:
        """Indices have no gradient."""
        return (None,) * len(ctx.needs_input_grad)
