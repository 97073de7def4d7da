"""How a tensor lies in memory, as far as a graph is made from it."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch


def memory_form(tensor: torch.Tensor, *, strides: bool = False, offset: bool = False) -> Hashable:
    """What eager PyTorch computes by of how a tensor lies in memory, in a value that compares and prints.

    `reshape`, `contiguous` and `flatten` give a view of some tensors and a copy of others, which shows where
    somebody writes to it, and random numbers go to the elements in the order in which they lie. Both follow
    from the order of the dimensions and from which of them lie side by side without a gap, and that is the
    same for all sizes.

    Args:
        tensor: an input.
        strides: whether code may ask for them, too. Those of a contiguous tensor follow from its sizes.
        offset: whether code may ask where the tensor begins.

    Returns:
        ``None`` for a contiguous tensor of which nothing more is asked.
    """
    if tensor.layout is not torch.strided:
        return str(tensor.layout)
    if offset:
        return tensor.storage_offset(), _strides(tensor)
    # Of a tensor without elements every order of memory is contiguous.
    if tensor.is_contiguous() and not (strides and tensor.numel() == 0):
        return None
    return _strides(tensor) if strides else _form(tensor)


def _strides(tensor: torch.Tensor) -> Hashable:
    """The formats in which a tensor is contiguous, or if it is in none, its strides."""
    formats = [torch.contiguous_format]
    formats += {4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(tensor.dim(), [])
    contiguous = tuple([tensor.is_contiguous(memory_format=format) for format in formats])
    return contiguous if any(contiguous) and tensor.numel() else tensor.stride()


def _form(tensor: torch.Tensor) -> Hashable:
    """The order of the dimensions, which of them lie side by side, and the strides of 0 and 1."""
    places = [
        (axis, size, stride)
        for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
        if size != 1
    ]
    order = tuple([axis for axis, _, _ in sorted(places, key=lambda place: -place[2])])
    beside = tuple(
        [(axis, inner) for axis, _, step in places for inner, size, stride in places if step == size * stride]
    )
    return order, beside, tuple([(axis, stride) for axis, _, stride in places if stride < 2])


def form_of(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Makes a tensor of any numbers that is like another one, and does not hold that one."""
    size, stride, dtype, device = tensor.size(), tensor.stride(), tensor.dtype, tensor.device
    is_parameter, requires_grad = isinstance(tensor, torch.nn.Parameter), tensor.requires_grad

    def make() -> torch.Tensor:
        like = torch.empty_strided(size, stride, dtype=dtype, device=device)
        return torch.nn.Parameter(like, requires_grad) if is_parameter else like.requires_grad_(requires_grad)

    return make
