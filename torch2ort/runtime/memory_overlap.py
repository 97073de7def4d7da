"""Refusal of calls whose inputs share memory that the graph writes to.

A graph computes from the values that its inputs had before the run, and copies written values back after it.
In eager PyTorch, a write to one tensor changes every tensor over the same memory at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from torch2ort.errors import ExportError
from torch2ort.graph.identical_inputs import Identical
from torch2ort.graph.mutation import Mutation

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class WrittenMemory:
    """The memory that a graph writes to, which a call must not pass twice.

    Args:
        inputs: the graph's inputs of the call, in order.
        mutations: the graph's writes to inputs and buffers.
        same: for each input, the position of the first input that is the same object.
    """

    def __init__(self, inputs: Sequence[str], mutations: Iterable[Mutation], same: Identical = ()) -> None:
        self._inputs, self._same = inputs, same or range(len(inputs))
        targets = {kind: {m.target for m in mutations if m.kind == kind} for kind in ("input", "buffer")}
        self._written = [i for i, name in enumerate(inputs) if name in targets["input"]]
        self._buffers = targets["buffer"]
        self._held: tuple[Sequence[torch.Tensor], dict[int, list[tuple[str, torch.Tensor]]]] = (), {}

    def refuse_shared(
        self, model: str, tensors: Sequence[torch.Tensor], names: Sequence[str], held: Sequence[torch.Tensor]
    ) -> None:
        """Refuse a call that passes memory a second time that the graph writes to.

        Args:
            model: the model's name for messages.
            tensors: the call's tensors.
            names: the names of the model's parameters and buffers.
            held: one tensor per name; the same sequence as before if none was replaced.

        Raises:
            ExportError: two tensors overlap, and the graph writes to one of them.
        """
        if self._held[0] is not held:
            self._held = held, self._by_storage(zip(names, held, strict=True))
        held_there = self._held[1]
        places = [_storage(tensor) for tensor in tensors]
        for i, place in enumerate(places):
            for name, tensor in held_there.get(place, ()):
                if (i in self._written or name in self._buffers) and overlap(tensors[i], tensor):
                    self._refuse(model, i, f"the model's '{name}'")
        for i in self._written:
            for j, place in enumerate(places):
                if i != self._same[j] and place == places[i] and overlap(tensors[i], tensors[j]):
                    self._refuse(model, i, f"the argument '{self._inputs[j]}'")

    def _by_storage(
        self, held: Iterable[tuple[str, torch.Tensor]]
    ) -> dict[int, list[tuple[str, torch.Tensor]]]:
        """Return the model's tensors that a call may overlap with: all, if the graph writes to an input."""
        found: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in held:
            if (self._written or name in self._buffers) and type(tensor) in _PLAIN:
                found.setdefault(_storage(tensor), []).append((name, tensor))
        return found

    def _refuse(self, model: str, position: int, other: str) -> None:
        raise ExportError(
            f"{model}: the argument '{self._inputs[position]}' shares memory with {other}, and forward "
            f"writes to it, which a graph does once it has read all of them. Pass a clone() of one of them"
        )


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if an element of one tensor is in the memory of the other."""
    if not one.numel() or not other.numel() or _storage(one) != _storage(other):
        return False
    (first, end), (other_first, other_end) = _range(one), _range(other)
    if end <= other_first or other_end <= first:
        return False
    if one.is_contiguous() and other.is_contiguous():
        return True
    # Compare single bytes: views may interleave, as the columns of a matrix do.
    taken = torch.zeros(max(end, other_end), dtype=torch.bool)
    _bytes(taken, one).fill_(True)
    return bool(_bytes(taken, other).any())


def _storage(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the byte after its last."""
    size = tensor.element_size()
    first = int(tensor.storage_offset()) * size
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (int(last) + 1) * size


def _bytes(taken: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    size = tensor.element_size()
    steps = [step * size for step in tensor.stride()]
    return taken.as_strided((*tensor.shape, size), (*steps, 1), tensor.storage_offset() * size)
