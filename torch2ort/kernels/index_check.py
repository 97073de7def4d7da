"""The check of an index tensor: a call of Python in a graph for training, ONNX operators in any other graph.

In eager PyTorch, each operator raises its own error for an index out of bounds. ONNX counts negative indices
from the end, and some kernels of ONNX Runtime read the memory that an index points to, whatever it is.
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

# The prefix of the message of a condition for which Python code of eager PyTorch raises a ValueError.
VALUE_ERROR = "torch2ort ValueError: "
CHECKED_INDEX = "torch2ort::CheckedIndex"
# The size for indices that only memory bounds.
BOUNDLESS = 1 << 62


@dataclass(frozen=True, slots=True)
class Check:
    """The numbers that an index tensor may contain.

    Attributes:
        call: eager PyTorch's operator, as :func:`torch2ort.kernels.functions.encode_call` writes it.
        index: position of the index tensor among the call's tensors.
        source: position of the tensor that is indexed; ``None`` if :attr:`size` is its size.
        dim: the dimension that is indexed; ``None`` for all elements.
        size: the first number that is too large, if there is no :attr:`source`.
        low: the smallest number; ``None`` for minus the size.
        ignored: a number that is also allowed.
        exact: whether the operator that reads the index does not check it itself, in ONNX Runtime.
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
        """Return the text that :func:`decode_check` reads."""
        return json.dumps(asdict(self), sort_keys=True)


@functools.lru_cache(maxsize=4096)
def decode_check(text: str) -> Check:
    """Return the check that ``text`` describes.

    Raises:
        ModelLoadError: the text does not describe a check.
    """
    try:
        check = Check(**json.loads(text))
        tensors = decode_call(check.call).tensors
        numbers = (check.source, check.dim, check.size, check.low, check.ignored)
        if type(check.index) is not int or not all(n is None or type(n) is int for n in numbers):
            raise ValueError("a number is not an integer")
        if not (0 <= check.index < tensors and -1 < (check.source or 0) < tensors):
            raise ValueError("a tensor's number is too large")
        if check.source is None and check.size is None:
            raise ValueError("nothing is indexed")
    except (ValueError, TypeError) as error:
        raise ModelLoadError(f"not the check of an index: {text!r} ({error})") from None
    return check


def are_inside(check: Check, index: torch.Tensor, sizes: Sequence[int]) -> bool:
    """Return True if all numbers of an index tensor are allowed.

    Args:
        check: the numbers that are allowed.
        index: the index tensor.
        sizes: those of the tensor that is indexed; unused without :attr:`Check.source`.
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
    """Raise the error of eager PyTorch if an index is out of bounds.

    Args:
        text: describes a :class:`Check`.
        tensors: those of its call.
    """
    check = decode_check(text)
    if are_inside(check, tensors[check.index], () if check.source is None else tensors[check.source].shape):
        return
    # The operator itself raises the error.
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
    """The same indices, checked: raises the error of eager PyTorch if one is out of bounds."""

    @staticmethod
    def forward(ctx: Any, text: str, *tensors: torch.Tensor) -> torch.Tensor:
        """Return a copy of the index tensor.

        Args:
            ctx: the context.
            text: describes a :class:`Check`.
            tensors: those of its call.
        """
        index = tensors[decode_check(text).index]
        # While a graph is made, tensors are of a class without data.
        if type(index) is torch.Tensor:
            refuse_index(text, tensors)
        result = index.clone(memory_format=torch.contiguous_format)
        ctx.mark_non_differentiable(result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, ...]:
        """Return no gradients: indices have none."""
        return (None,) * len(ctx.needs_input_grad)
