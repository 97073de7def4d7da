"""PyTorch's tensors as ONNX Runtime's values, without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch2ort.errors import EngineError
from torch2ort.runtime.ortvalues import plain, shares_memory, value_maker

_NOTHING = (-1, torch.Size(), None)


def as_fed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in the form that a session accepts; see :func:`plain`.

    Raises:
        EngineError: it is not on the CPU.
    """
    if not tensor.is_cpu:
        raise EngineError(
            f"a tensor is on {tensor.device}; the installed engine runs on the CPU. "
            f"Move the model and its inputs with .cpu()"
        )
    return plain(tensor)


class Feeds:
    """Conversion of a session's feeds to OrtValues; those of weights are made once and cached.

    Args:
        inputs: number of leading feeds that change in every call, unless they are parameters.
    """

    def __init__(self, inputs: int) -> None:
        self._inputs = inputs
        self._make = value_maker()
        self._keeps = shares_memory()
        # For each weight: address and shape of the memory that the value refers to, and the value. The value
        # keeps that memory alive, so an equal address means the same memory.
        self._kept: dict[int, tuple[int, torch.Size, Any]] = {}

    def values(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Return one OrtValue per tensor.

        Raises:
            EngineError: a tensor is not on the CPU.
        """
        values = []
        make = self._make
        for i, tensor in enumerate(tensors):
            if i < self._inputs and type(tensor) is not torch.nn.Parameter:
                values.append(make(as_fed(tensor)))
                continue
            address, shape, value = self._kept.get(i, _NOTHING)
            if tensor.data_ptr() != address or tensor.shape != shape:
                value = make(as_fed(tensor))
                if self._keeps and tensor.is_contiguous():
                    self._kept[i] = (tensor.data_ptr(), tensor.shape, value)
            values.append(value)
        return values
