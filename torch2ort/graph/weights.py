"""The weights of a graph: inputs of the graph in the model's process, initializers in saved models."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import replace

import onnx
import onnx.numpy_helper
import torch

from torch2ort.graph.fold_weights import fold_weights
from torch2ort.graph.graph import Graph
from torch2ort.graph.portable_paths import shorten_paths
from torch2ort.pythonop import ONNX_TYPES

_DTYPES = {number: dtype for dtype, number in ONNX_TYPES.items()}


def state_of(graph: Graph) -> dict[str, str]:
    """Return graph input -> name, for the buffers that the model reads and updates."""
    updated = {m.target for m in graph.mutations if m.kind == "buffer"}
    return {name: origin for name, origin in graph.weights.items() if origin in updated}


def freeze(
    graph: Graph, weights: Mapping[str, torch.Tensor], *, folds: bool = True
) -> tuple[Graph, dict[str, torch.Tensor]]:
    """Return ``graph`` with the current values of its weights as initializers, and the values of its state.

    Args:
        graph: the graph.
        weights: its weights.
        folds: see :func:`with_weights`.
    """
    state = state_of(graph)
    fixed = replace(graph, weights={name: o for name, o in graph.weights.items() if name not in state})
    with torch.inference_mode(False):
        values = {name: weights[name].detach().clone() for name in state}
    return replace(graph, proto=with_weights(fixed, weights, folds=folds), weights=state), values


def with_weights(graph: Graph, weights: Mapping[str, torch.Tensor], *, folds: bool = True) -> onnx.ModelProto:
    """Return ``graph`` with the current values of ``weights`` as initializers; its state remains an input.

    Args:
        graph: the graph.
        weights: its weights.
        folds: whether values that depend only on weights are computed; if not, each weight is stored
            unchanged.
    """
    model = onnx.ModelProto()
    model.CopyFrom(graph.proto)
    state = state_of(graph)
    inputs = [v for v in model.graph.input if v.name not in graph.weights or v.name in state]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    for name in graph.weights:
        _write(model.graph.initializer.add(), name, weights[name])
    if folds:
        fold_weights(model)
    shorten_paths(model)
    return model


def take_state(model: onnx.ModelProto, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Remove the initial values of the state from ``model`` and return them: state is fed in each call.

    Raises:
        KeyError: a value is missing.
    """
    initializers = {value.name: value for value in model.graph.initializer}
    if not names.keys() <= {value.name for value in model.graph.input}:
        raise KeyError("state")
    values = {name: _tensor(initializers[name]) for name in names}
    for name in names:
        model.graph.initializer.remove(initializers[name])
    return values


def _tensor(initializer: onnx.TensorProto) -> torch.Tensor:
    content = onnx.numpy_helper.to_array(initializer).tobytes()
    dtype = _DTYPES[initializer.data_type]
    if not content:
        return torch.empty(list(initializer.dims), dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(list(initializer.dims))


def _write(initializer: onnx.TensorProto, name: str, tensor: torch.Tensor) -> None:
    """Write a tensor to ``initializer``, in place: protobuf cannot copy one of 2 GiB into a list."""
    tensor = tensor.detach().cpu().contiguous()
    initializer.name, initializer.data_type = name, ONNX_TYPES[tensor.dtype]
    initializer.dims.extend(tensor.shape)
    initializer.raw_data = _content(tensor)


def _content(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a contiguous tensor on the CPU."""
    if not tensor.numel():
        return b""
    # numpy is not used: PyTorch does not allow the memory of a tensor that was once an array to be freed, and
    # FSDP frees it. ctypes.string_at is not used: its size is a C int.
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()).raw
