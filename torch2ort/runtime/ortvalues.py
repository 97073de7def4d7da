"""Conversion of tensors to ONNX Runtime's values and back, without a copy where it supports DLPack."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import onnx
import torch
from torch.utils import dlpack

from torch2ort._torch.storage import from_capsule
from torch2ort.pythonop import ONNX_TYPES
from torch2ort.runtime import _ort_private as private

# Documented by torch, though its module does not list it.
to_capsule = dlpack.to_dlpack  # type: ignore[attr-defined]

_DTYPES = {number: dtype for dtype, number in ONNX_TYPES.items()}


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without its autograd graph and contiguous, as ONNX Runtime expects it.

    It is always another tensor: the caller's may get other memory (``tensor.data = ...``) while a value uses
    it.
    """
    # Contiguous memory may still have the negative bit set, as that of torch.imag(x.conj()).
    made = tensor.detach().resolve_neg().contiguous()
    # PyTorch does not change the strides of a tensor without elements, and ONNX Runtime may refuse them.
    return made if made.numel() else torch.empty(made.shape, dtype=made.dtype, device=made.device)


def to_value(tensor: torch.Tensor) -> Any:
    """Return an OrtValue of a contiguous tensor on the CPU that requires no gradient."""
    return value_maker()(tensor)


@functools.cache
def value_maker() -> Callable[[torch.Tensor], Any]:
    """Return :func:`to_value` for the installed onnxruntime."""
    if not shares_memory():
        return _copy_to_value
    make = private.pybind().OrtValue.from_dlpack
    if not private.needs_bool_flag():
        return lambda tensor: make(to_capsule(tensor))

    def made(tensor: torch.Tensor) -> Any:
        if tensor.dtype is torch.bool:
            # onnxruntime before 1.24 does not support DLPack's own code for bool.
            return make(to_capsule(tensor.view(torch.uint8)), True)
        return make(to_capsule(tensor), False)

    return made


def to_tensor(value: Any) -> torch.Tensor:
    """Return a tensor of an OrtValue on the CPU."""
    if not shares_memory():
        return _copy_to_tensor(value)
    tensor: torch.Tensor = from_capsule(value.to_dlpack())
    if tensor.dtype is torch.uint8 and value.element_type() == ONNX_TYPES[torch.bool]:
        return tensor.view(torch.bool)
    return tensor


def to_tensors(values: Any, bools: Iterable[int]) -> list[torch.Tensor]:
    """Return a tensor of each OrtValue on the CPU.

    Args:
        values: the result of ``run_with_ort_values``.
        bools: positions of bool values; see :func:`bool_outputs`.
    """
    if not len(values):
        return []
    if shares_memory():
        tensors: list[torch.Tensor] = values.to_dlpacks(from_capsule)
    else:
        # Not iterated over: the end of iteration is a C++ exception, which costs more than a small model.
        tensors = [_copy_to_tensor(values[i]) for i in range(len(values))]
    restore_bools(tensors, bools)
    return tensors


def own_items(values: Any, positions: Iterable[int]) -> dict[int, Any]:
    """Return items of a vector that a run returned, without keeping the others alive.

    Args:
        values: the result of ``run_with_ort_values``.
        positions: positions of the items.
    """
    found = {}
    for position in positions:
        vector = private.pybind().OrtValueVector()
        vector.push_back(values[position])
        found[position] = vector[0]
    return found


def bool_outputs(graph: onnx.GraphProto, names: Sequence[str]) -> frozenset[int]:
    """Return the positions among ``names`` of the graph's bool outputs."""
    types = {value.name: value.type.tensor_type.elem_type for value in graph.output}
    return frozenset(i for i, name in enumerate(names) if types.get(name) == onnx.TensorProto.BOOL)


def restore_bools(tensors: list[torch.Tensor], positions: Iterable[int]) -> None:
    """Convert tensors of bytes back to bool, in place."""
    for i in positions:
        if tensors[i].dtype is torch.uint8:
            tensors[i] = tensors[i].view(torch.bool)


@functools.cache
def shares_memory() -> bool:
    """Return True if values are made without a copy, as in all versions but onnxruntime 1.20 and 1.21."""
    return hasattr(private.pybind().OrtValue, "from_dlpack")


def _copy_to_value(tensor: torch.Tensor) -> Any:
    ort = private.pybind()
    device = ort.OrtDevice(ort.OrtDevice.cpu(), ort.OrtDevice.default_memory(), 0)
    value = ort.OrtValue.ortvalue_from_shape_and_onnx_type(
        list(tensor.shape), ONNX_TYPES[tensor.dtype], device
    )
    if tensor.numel():
        ctypes.memmove(value.data_ptr(), tensor.data_ptr(), tensor.nbytes)
    return value


def _copy_to_tensor(value: Any) -> torch.Tensor:
    tensor = torch.empty(value.shape(), dtype=_DTYPES[value.element_type()])
    if tensor.numel():
        ctypes.memmove(tensor.data_ptr(), value.data_ptr(), tensor.nbytes)
    return tensor
