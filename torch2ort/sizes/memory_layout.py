"""Memory layout of tensors, as far as a graph depends on it."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch


def memory_form(tensor: torch.Tensor, *, strides: bool = False, offset: bool = False) -> Hashable:
    """Return what eager PyTorch's results depend on in a tensor's memory layout, as a comparable value.

    `reshape`, `contiguous` and `flatten` return a view of some tensors and a copy of others, which matters
    where the result is written to. Random numbers are assigned to the elements in their order in memory. Both
    depend on the order of the dimensions and on which of them are adjacent without a gap, and that is the
    same for all sizes.

    Args:
        tensor: an input.
        strides: True if code may read the strides, too. Those of a contiguous tensor follow from its sizes.
        offset: True if code may read where the tensor begins.

    Returns:
        ``None`` for a contiguous tensor if no code reads more than that.
    """
    if tensor.layout is not torch.strided:
        return str(tensor.layout)
    if offset:
        return tensor.storage_offset(), _strides(tensor)
    # A tensor without elements is contiguous in every memory format.
    if tensor.is_contiguous() and not (strides and tensor.numel() == 0):
        return None
    return _strides(tensor) if strides else _form(tensor)


def _strides(tensor: torch.Tensor) -> Hashable:
    """Return the memory formats in which a tensor is contiguous; its strides if there are none."""
    formats = [torch.contiguous_format]
    formats += {4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(tensor.dim(), [])
    contiguous = tuple([tensor.is_contiguous(memory_format=format) for format in formats])
    return contiguous if any(contiguous) and tensor.numel() else tensor.stride()


def _form(tensor: torch.Tensor) -> Hashable:
    """Return the order of the dimensions, the adjacent ones, and the strides of 0 and 1."""
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
    """Return a function that makes an uninitialized tensor like ``tensor`` and holds no reference to it."""
    size, stride, dtype, device = tensor.size(), tensor.stride(), tensor.dtype, tensor.device
    is_parameter, requires_grad = isinstance(tensor, torch.nn.Parameter), tensor.requires_grad

    def make() -> torch.Tensor:
        like = torch.empty_strided(size, stride, dtype=dtype, device=device)
        return torch.nn.Parameter(like, requires_grad) if is_parameter else like.requires_grad_(requires_grad)

    return make
