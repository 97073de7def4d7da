"""The initializers of an ONNX model as parameters and buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import torch

# What says in a file that an initializer is one of a model's trained weights; constants have no such word.
TRAINED = "trained weight"
# Running statistics: operator -> positions of its inputs.
_STATISTICS = {"BatchNormalization": (3, 4)}


class Weights(torch.nn.Module):
    """Parameters, one for each initializer that is trained; buffers for the others of floating point.

    Whole numbers stay constants. Files of torch2ort say which initializers are weights; in others all of
    floating point are, but for scalars and running statistics.

    Args:
        model: whose initializers.

    Attributes:
        attributes: initializer -> name of the parameter or buffer.
        constants: name -> value of those that are neither.
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
        """Keep a constant as a buffer that is no part of the state, and return that one's name."""
        if name not in self._added:
            self._added[name] = f"constant_{len(self._added)}"
            self.register_buffer(self._added[name], torch.from_numpy(np.array(value)), persistent=False)
        return self._added[name]
