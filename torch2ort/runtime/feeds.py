"""PyTorch's tensors as ONNX Runtime's values, without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch2ort.errors import EngineError
from torch2ort.runtime.values import plain, shares_memory, to_value


class Feeds:
    """Turns the feeds of a session into OrtValues; those of weights are made once and kept.

    Args:
        inputs: number of feeds in front that are another tensor in every call.
    """

    def __init__(self, inputs: int) -> None:
        self._inputs = inputs
        # Per weight: address and shape of the memory that the value refers to, and the value. The value keeps
        # that memory alive, so the same address is the same memory.
        self._kept: list[tuple[int, torch.Size, Any]] = []

    def values(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """One OrtValue a tensor.

        Raises:
            EngineError: a tensor is not on the CPU.
        """
        values = [self._value(tensor) for tensor in tensors[: self._inputs]]
        weights = tensors[self._inputs :]
        if not self._kept:
            self._kept = [(-1, torch.Size(), None)] * len(weights)
        for i, tensor in enumerate(weights):
            address, shape, value = self._kept[i]
            if tensor.data_ptr() != address or tensor.shape != shape:
                value = self._value(tensor)
                if tensor.is_contiguous() and shares_memory():
                    self._kept[i] = (tensor.data_ptr(), tensor.shape, value)
            values.append(value)
        return values

    def _value(self, tensor: torch.Tensor) -> Any:
        if not tensor.is_cpu:
            raise EngineError(
                f"a tensor is on {tensor.device}; the installed engine runs on the CPU. "
                f"Move the model and its inputs with .cpu()"
            )
        return to_value(plain(tensor))
