"""Results that depend on a tensor's memory layout are the same for all tensors of one form."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterator

import pytest
import torch

from torch2ort.sizes.memory_layout import memory_form

SIZES = [(4, 3, 2), (3, 3, 3), (4, 1, 2), (2, 6), (2, 3, 2, 2)]
PARTS = [slice(None), slice(1, None), slice(None, None, 2)]


def tensors(sizes: tuple[int, ...]) -> Iterator[torch.Tensor]:
    """Tensors of these sizes in every order of memory, parts of larger ones, and with repeated elements."""
    for order in itertools.permutations(range(len(sizes))):
        back = [order.index(axis) for axis in range(len(sizes))]
        for parts in itertools.product(PARTS, repeat=len(sizes)):
            whole = [
                sizes[axis] * (p.step or 1) + (p.start or 0) for axis, p in zip(order, parts, strict=True)
            ]
            yield torch.zeros(whole)[parts].permute(back)
    for axis in range(len(sizes)):
        yield torch.zeros([1 if i == axis else size for i, size in enumerate(sizes)]).expand(sizes)


def behaviour(tensor: torch.Tensor) -> Hashable:
    """The copies that PyTorch makes of a tensor, and the order in which it fills one."""
    reshaped = [tensor.reshape(new).data_ptr() == tensor.data_ptr() for new in _shapes(tuple(tensor.shape))]
    formats = [torch.contiguous_format, *([torch.channels_last] if tensor.dim() == 4 else [])]
    contiguous = [tensor.is_contiguous(memory_format=format) for format in formats]
    torch.manual_seed(0)
    drawn = torch.nn.functional.dropout(tensor + 1)
    return tuple(reshaped), tuple(contiguous), tuple(drawn.flatten().tolist())


def _shapes(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Shapes in which neighbours of ``sizes`` are one dimension."""
    found = [(-1,)]
    for axis in range(len(sizes) - 1):
        found.append((*sizes[:axis], sizes[axis] * sizes[axis + 1], *sizes[axis + 2 :]))
    return found


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_tensors_of_one_form_are_copied_and_filled_alike(sizes):
    found: defaultdict[Hashable, set[Hashable]] = defaultdict(set)
    for tensor in tensors(sizes):
        found[memory_form(tensor)].add(behaviour(tensor))
    assert len(found) > 5
    assert {form: len(met) for form, met in found.items() if len(met) > 1} == {}


@pytest.mark.parametrize("turned", [False, True], ids=["contiguous", "transposed"])
def test_the_form_is_the_same_for_all_sizes_and_offsets(turned):
    parts = [torch.zeros(8, size) for size in (2, 3, 5)] + [torch.zeros(8, 4)[2:6], torch.zeros(9, 4)[:7]]
    forms = {memory_form(part.mT if turned else part) for part in parts}
    assert len(forms) == 1


def test_strides_and_offsets_are_told_to_who_asks():
    whole = torch.zeros(8, 4)
    assert memory_form(whole[2:], strides=True) == memory_form(whole, strides=True)
    assert memory_form(whole[:, :2], strides=True) != memory_form(torch.zeros(8, 3)[:, :2], strides=True)
    assert memory_form(whole[2:], offset=True) != memory_form(whole, offset=True)


def test_tensors_without_elements_lie_in_any_order():
    empty = torch.zeros(0, 3)
    assert memory_form(empty) == memory_form(empty.clone().as_strided((0, 3), (1, 7)))
    assert memory_form(empty, strides=True) != memory_form(empty.as_strided((0, 3), (1, 7)), strides=True)
