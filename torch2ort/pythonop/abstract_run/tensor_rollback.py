"""Rollback of writes to tensors by code that an export observes.

An operator on a tensor outside of the trace runs on its memory even if all others run without data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from torch2ort._torch import autograd_functions as private

# Functions that return a tensor's memory, so that code may write to it undetected.
_HAND_OUT: frozenset[Any] = frozenset(
    (
        torch.Tensor.numpy,
        torch.Tensor.__array__,
        torch.Tensor.__dlpack__,
        torch.Tensor.data_ptr,
        torch.Tensor.storage,
        torch.Tensor.untyped_storage,
    )
)


class TensorRollback(private.TorchDispatchMode):
    """Context that undoes at exit the writes of code to tensors that existed before.

    Args:
        own: tensors that may be written to.
    """

    def __init__(self, own: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._new = {StorageWeakRef(t.untyped_storage()) for t in own}
        # Memory that is freed meanwhile was new: NumPy does not report that. So no reference here keeps it.
        self._before: dict[StorageWeakRef, torch.UntypedStorage] = {}
        self._written: set[StorageWeakRef] = set()
        self._moved: list[TensorPlacement] = []
        self._handed_out = _HandedOut(self)

    def __enter__(self) -> TensorRollback:
        self._handed_out.__enter__()
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator."""
        kwargs = kwargs or {}
        written = [t for t in private.written_arguments(func, args, kwargs) if private.is_plain(t)]
        older = [t for t in written if self.remember(t) in self._before]
        self._written |= memory(older)
        before = [TensorPlacement(t) for t in older]
        result = func(*args, **kwargs)
        self._moved += [place for place in before if place.is_left()]
        made = [t for t in _tensors(result) if private.is_plain(t)]
        if made:
            given = _tensors((*args, *kwargs.values()))
            self._new |= memory(made) - memory([t for t in given if private.is_plain(t)])
        return result

    def remember(self, tensor: torch.Tensor) -> StorageWeakRef:
        """Save the present content of a tensor's memory, if that existed before this context."""
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        if reference not in self._new:
            self._new.add(reference)
            with private.without_modes():
                self._before[reference] = storage.clone()
        return reference

    def has_writes(self) -> bool:
        """Return True if the code wrote to memory that existed before and still exists."""
        if self._moved or any(not reference.expired() for reference in self._written):
            return True
        with private.without_modes():
            return any(not _equal(storage, before) for storage, before in self._previous_contents())

    def __exit__(self, *error: Any) -> None:
        """See the class."""
        super().__exit__(*error)
        self._handed_out.__exit__(*error)
        with private.without_modes():
            for place in reversed(self._moved):
                place.restore()
            for storage, before in self._previous_contents():
                if storage.nbytes() != before.nbytes():
                    storage.resize_(before.nbytes())
                storage.copy_(before)

    def _previous_contents(self) -> Iterator[tuple[torch.UntypedStorage, torch.UntypedStorage]]:
        """Yield memory that still exists, and its previous content."""
        for reference, before in self._before.items():
            storage = private.storage_of(reference)
            if storage is not None:
                yield storage, before


class _HandedOut(TorchFunctionMode):
    """Observer that saves tensors whose memory leaves torch."""

    def __init__(self, undone: TensorRollback) -> None:
        super().__init__()
        self._undone = undone

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        if func in _HAND_OUT and private.is_plain(args[0]):
            self._undone.remember(args[0])
        return func(*args, **(kwargs or {}))


class TensorPlacement:
    """Memory of a tensor: the storage, and the part of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._at = tensor, _place(tensor)
        with private.without_modes():
            self._before = tensor.detach()

    def is_left(self) -> bool:
        """Return True if the tensor has moved to other memory, or to another part."""
        return not private.is_plain(self._tensor) or _place(self._tensor) != self._at

    def restore(self) -> bool:
        """Move the tensor back, and return whether it had moved."""
        if not self.is_left():
            return False
        with private.without_modes():
            self._tensor.data = self._before
        return True


def places(values: Iterable[tuple[str, Any]]) -> list[tuple[str, TensorPlacement]]:
    """Return the places of the tensors among values, with their paths.

    An assignment of other memory (``t.data = other``) is not an operator, and does not change the tensor's
    owner.
    """
    kinds = (torch.Tensor, torch.nn.Parameter)
    return [(path, TensorPlacement(v)) for path, v in values if type(v) in kinds and private.is_plain(v)]


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return StorageWeakRef(tensor.untyped_storage()), tensor.storage_offset(), tensor.shape, tensor.stride()


def _equal(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    if one.nbytes() != other.nbytes():
        return False
    numbers = [torch.empty(0, dtype=torch.uint8, device=s.device).set_(s) for s in (one, other)]
    return bool(torch.equal(*numbers))


def memory(values: Any) -> set[StorageWeakRef]:
    """Return the memory of the tensors among values, which may be nested."""
    return {StorageWeakRef(tensor.untyped_storage()) for tensor in _tensors(values)}


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.layout is torch.strided else []
    return [t for item in value for t in _tensors(item)] if isinstance(value, (list, tuple)) else []
