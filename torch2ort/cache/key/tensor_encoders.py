"""Encoders of tensors, of arrays, and of C memory."""

from __future__ import annotations

import ctypes
import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torch2ort._torch import global_state as private
from torch2ort.cache.key.container_encoders import memory
from torch2ort.cache.key.guards import PLAIN

if TYPE_CHECKING:
    from torch2ort.cache.key.object_encoder import ObjectEncoder

# Size in bytes above which a tensor is identified by its identity and version within a process.
_LARGE = 1 << 20


def array(encoder: ObjectEncoder, value: np.ndarray[Any, Any]) -> None:
    """Write a NumPy array; the elements of a large one are read only for a key."""
    if value.dtype.hasobject:
        encoder.walk.refuse("a NumPy array of Python objects cannot be compared between processes", value)
        return
    if value.nbytes > _LARGE:
        encoder.walk.atom((value.dtype.str, value.shape, value.strides))
        encoder.walk.guards.pin(value)
        encoder.walk.content(value)
        if value.flags.writeable:
            encoder.walk.note_unseen(
                f"a NumPy array of {value.nbytes} bytes would have to be compared before each call. Make "
                f"it a buffer with torch.from_numpy(array), or set array.flags.writeable = False"
            )
        else:
            encoder.guard_value(lambda: value.flags.writeable, value)
        return
    encoder.guard_value(lambda: (value.dtype.str, value.shape, value.tobytes()), value)
    encoder.walk.atom((value.dtype.str, value.shape, value.strides, digest_of(value)))


def subclass_of_array(encoder: ObjectEncoder, value: np.ndarray[Any, Any]) -> None:
    """Write an array of a subclass of ``numpy.ndarray``."""
    encoder.walk.guards.type_of(value, encoder.walk.place)
    encoder.definitions.class_(type(value))
    array(encoder, value)
    encoder.attributes(value)


def foreign(encoder: ObjectEncoder, value: Any) -> None:
    """Write C memory, also memory that other processes write to."""
    encoder.definitions.class_(type(value))
    memory(encoder, value)


def tensor(encoder: ObjectEncoder, value: torch.Tensor) -> None:
    """Write a tensor's type, layout and values; the values of a large one are read only for a key."""
    if type(value) is not torch.Tensor:
        encoder.definitions.class_(type(value))
    if value.layout is not torch.strided or value.device.type == "meta" or value.is_quantized:
        encoder.walk.refuse(
            f"a tensor on {value.device} of layout {value.layout} has no values that can be compared",
            value,
        )
        return
    fed = id(value) in encoder.fed
    if not fed:
        encoder.guard_value(lambda: _form(value), value)
    encoder.walk.atom(describe(value))
    if fed or value.nbytes > _LARGE:
        if not fed:
            encoder.walk.guards.pin(value, private.version_of(value))
        encoder.walk.content(value)
    else:
        encoder.walk.atom(digest_of(value))
    encoder.attributes(value)


def digest_of(value: torch.Tensor | np.ndarray[Any, Any]) -> str:
    """Return the SHA-256 of the elements, in the order of a contiguous tensor or array."""
    if isinstance(value, np.ndarray):
        return hashlib.sha256(value.tobytes()).hexdigest()
    plain = value.detach().cpu().contiguous()
    # ctypes instead of NumPy: PyTorch refuses to free the memory of a tensor that was once an array, as
    # FSDP does.
    content = (ctypes.c_ubyte * plain.nbytes).from_address(plain.data_ptr())
    return hashlib.sha256(content).hexdigest()


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a value that changes if a tensor whose values are in the graph is replaced or written to."""
    return private.version_of(tensor), tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.requires_grad


def describe(tensor: torch.Tensor) -> str:
    """Return everything about a tensor that a graph depends on, except for its values."""
    kind = "Tensor" if type(tensor) in PLAIN else type(tensor).__name__
    return (
        f"{kind} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} "
        f"strides {list(tensor.stride())} on {tensor.device} requires_grad={tensor.requires_grad}"
    )
