"""Recurrent nets: torch.onnx's translations of LSTM and GRU, and torch2ort's own of the plain ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from torch2ort._torch import onnx_exporter as private
from torch2ort.kernels.recurrent import ORIGINALS
from torch2ort.symbolics.graph_builder import constant, op, ops
from torch2ort.symbolics.translations.registry import translates

aten = torch.ops.aten
_ACTIVATIONS = {aten.rnn_tanh.input: "Tanh", aten.rnn_relu.input: "Relu"}


def _as(operator: Any) -> Callable[..., Any]:
    """Return the translation of the operator that a stand-in replaces."""

    def translate(*arguments: Any) -> Any:
        if operator in _ACTIVATIONS:
            return _plain_net(_ACTIVATIONS[operator], *arguments)
        translation = private.torchlib_translation(operator)
        if translation is None:
            raise NotImplementedError(f"torch.onnx does not translate {operator}")
        return translation(*arguments)

    return translate


def _plain_net(
    activation: str,
    input: ir.Value,
    hx: ir.Value,
    params: Sequence[ir.Value],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[ir.Value, ir.Value]:
    """Compute layers ``activation(W x + b + R h + c)``; a net with random numbers has a single layer here."""
    assert hx.shape is not None
    directions = 2 if bidirectional else 1
    by_direction = [params[i :: 4 if has_biases else 2] for i in range(4 if has_biases else 2)]
    x = op("Transpose", input, perm=[1, 0, 2]) if batch_first else input
    states = []
    for layer in range(num_layers):
        numbers = range(layer * directions, (layer + 1) * directions)
        weight, recurrent = (_stacked([by_direction[i][n] for n in numbers]) for i in (0, 1))
        bias = None
        if has_biases:
            pairs = [op("Concat", by_direction[2][n], by_direction[3][n], axis=0) for n in numbers]
            bias = _stacked(pairs)
        state = hx
        if num_layers > 1:
            start, end, axes = (constant([n]) for n in (numbers.start, numbers.stop, 0))
            state = op("Slice", hx, start, end, axes)
        result, last = ops(
            "RNN",
            *(x, weight, recurrent, bias, None, state),
            dtypes=(None, None),
            hidden_size=hx.shape[2],
            direction="bidirectional" if bidirectional else "forward",
            activations=[activation] * directions,
        )
        states.append(last)
        if bidirectional:
            result = op("Transpose", result, perm=[0, 2, 1, 3])
            x = op("Reshape", result, constant(np.array([0, 0, -1], np.int64)))
        else:
            x = op("Squeeze", result, constant([1]))
    output = op("Transpose", x, perm=[1, 0, 2]) if batch_first else x
    return output, op("Concat", *states, axis=0) if num_layers > 1 else states[0]


def _stacked(parts: Sequence[ir.Value]) -> ir.Value:
    """Stack the tensors of all directions along a new first dimension."""
    rows = [op("Unsqueeze", part, constant([0])) for part in parts]
    return op("Concat", *rows, axis=0) if len(rows) > 1 else rows[0]


for _stand_in, _operator in ORIGINALS.items():
    translates(_stand_in)(_as(_operator))
