"""The initializers of an ONNX model as parameters and buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import torch

# The doc_string of an initializer that is a trained weight of a model; constants do not have it.
TRAINED = "trained weight"
# Running statistics: operator -> positions of its inputs.
_STATISTICS = {"BatchNormalization": (3, 4)}


class Weights(torch.nn.Module):
    """Parameters, one for each trained initializer, and buffers for the other floating-point initializers.

    Integers stay constants. Files of torch2ort mark the initializers that are weights. In other files, all
    floating-point initializers but scalars and running statistics are weights.

    Args:
        model: the model with the initializers.

    Attributes:
        attributes: initializer -> name of the parameter or buffer.
        constants: name -> value, of the initializers that are neither.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        super().__init__()
        graph = model.graph
        told = {one.name for one in graph.initializer if one.doc_string == TRAINED}
        fixed = {
            node.input[position]
            for node in graph.node
            for position in _STATISTICS.get(node.op_type, ())
            if position < len(node.input)
        }
        self.attributes: dict[str, str] = {}
        self.constants: dict[str, np.ndarray[Any, Any]] = {}
        for initializer in graph.initializer:
            value = np.array(onnx.numpy_helper.to_array(initializer))
            trained = initializer.name in told if told else value.ndim > 0 and initializer.name not in fixed
            if value.dtype.kind != "f":
                self.constants[initializer.name] = value
                continue
            name = self.attributes[initializer.name] = f"weight_{len(self.attributes)}"
            if trained:
                self.register_parameter(name, torch.nn.Parameter(torch.from_numpy(value)))
            else:
                self.register_buffer(name, torch.from_numpy(value))
        self._added: dict[str, str] = {}

    def add_constant(self, name: str, value: np.ndarray[Any, Any]) -> str:
        """Register a constant as a buffer that is not part of the state, and return the buffer's name."""
        if name not in self._added:
            self._added[name] = f"constant_{len(self._added)}"
            self.register_buffer(self._added[name], torch.from_numpy(np.array(value)), persistent=False)
        return self._added[name]
