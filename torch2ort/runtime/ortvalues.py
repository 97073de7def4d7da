"""PyTorch's tensors as onnxruntime's values and back; without a copy where onnxruntime speaks DLPack."""

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
    """The tensor without its graph and contiguous, as onnxruntime takes it.

    Always another tensor: a value holds a tensor, and that one may get other memory (``tensor.data = ...``).
    """
    # Contiguous memory may still hold the numbers with another sign, as that of torch.imag(x.conj()) does.
    made = tensor.detach().resolve_neg().contiguous()
    # Of a tensor without elements PyTorch leaves the strides as they are, which onnxruntime refuses.
    return made if made.numel() else torch.empty(made.shape, dtype=made.dtype, device=made.device)


def to_value(tensor: torch.Tensor) -> Any:
    """An OrtValue of a contiguous tensor on the CPU that requires no gradient."""
    return value_maker()(tensor)


@functools.cache
def value_maker() -> Callable[[torch.Tensor], Any]:
    """:func:`to_value` for the installed onnxruntime."""
    if not shares_memory():
        return _copy_to_value
    make = private.pybind().OrtValue.from_dlpack
    if not private.is_told_of_bools():
        return lambda tensor: make(to_capsule(tensor))

    def made(tensor: torch.Tensor) -> Any:
        if tensor.dtype is torch.bool:
            # onnxruntime before 1.24 is older than DLPack's own code for bool.
            return make(to_capsule(tensor.view(torch.uint8)), True)
        return make(to_capsule(tensor), False)

    return made


def to_tensor(value: Any) -> torch.Tensor:
    """A tensor of an OrtValue on the CPU."""
    if not shares_memory():
        return _copy_to_tensor(value)
    tensor: torch.Tensor = from_capsule(value.to_dlpack())
    if tensor.dtype is torch.uint8 and value.element_type() == ONNX_TYPES[torch.bool]:
        return tensor.view(torch.bool)
    return tensor


def to_tensors(values: Any, bools: Iterable[int]) -> list[torch.Tensor]:
    """A tensor of each OrtValue on the CPU.

    Args:
        values: what ``run_with_ort_values`` returned.
        bools: positions of those that are of bool; see :func:`bool_outputs`.
    """
    if not len(values):
        return []
    if shares_memory():
        tensors: list[torch.Tensor] = values.to_dlpacks(from_capsule)
    else:
        # Not iterated over: its end is an exception of C++, which costs more than a small model.
        tensors = [_copy_to_tensor(values[i]) for i in range(len(values))]
    restore_bools(tensors, bools)
    return tensors


def own_items(values: Any, positions: Iterable[int]) -> dict[int, Any]:
    """Items of a vector that a run returned, which do not keep the others alive.

    Args:
        values: what ``run_with_ort_values`` returned.
        positions: of the items.
    """
    found = {}
    for position in positions:
        vector = private.pybind().OrtValueVector()
        vector.push_back(values[position])
        found[position] = vector[0]
    return found


def bool_outputs(graph: onnx.GraphProto, names: Sequence[str]) -> frozenset[int]:
    """Positions among ``names`` of the graph's outputs that are of bool."""
    types = {value.name: value.type.tensor_type.elem_type for value in graph.output}
    return frozenset(i for i, name in enumerate(names) if types.get(name) == onnx.TensorProto.BOOL)


def restore_bools(tensors: list[torch.Tensor], positions: Iterable[int]) -> None:
    """Make bools of what came as bytes, in place."""
    for i in positions:
        if tensors[i].dtype is torch.uint8:
            tensors[i] = tensors[i].view(torch.bool)


@functools.cache
def shares_memory() -> bool:
    """Whether values are made without a copy: all but onnxruntime 1.20 and 1.21 do it."""
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
