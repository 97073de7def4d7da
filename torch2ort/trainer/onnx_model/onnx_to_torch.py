"""Translation of an ONNX model to an equivalent PyTorch module, with the initializers as its weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnx.numpy_helper
import torch

from torch2ort import UnsupportedOperatorError
from torch2ort.trainer.onnx_model.operators import OPERATORS
from torch2ort.trainer.onnx_model.operators.layers import Dropout
from torch2ort.trainer.onnx_model.weights import Weights

# The table has the operators as of opset 13; in earlier ones, axes were attributes.
_OLDEST, _NEWEST, _TARGET = 13, 28, 18
# A constant with more numbers is data.
_MOST_NUMBERS = 32
# Operators that return a tuple, however many of its values are read.
_TUPLES = ("Split", "TopK")
# Inputs that are Python numbers in PyTorch: operator -> positions.
_NUMBERS = {"Clip": (1, 2), "Pad": (2,), "TopK": (1,), "CumSum": (1,), "Trilu": (1,), "OneHot": (1,)}


def current(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model in an opset of the operators' table, without local functions.

    Raises:
        UnsupportedOperatorError: the model cannot be converted.
    """
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    version = next((one.version for one in model.opset_import if one.domain in ("", "ai.onnx")), _TARGET)
    if _OLDEST <= version <= _NEWEST:
        return model
    try:
        return onnx.version_converter.convert_version(model, _TARGET)
    except Exception as error:
        raise UnsupportedOperatorError(
            f"The ONNX model has opset {version}, and is not converted to {_TARGET}: {error}. Give one "
            f"of opset "
            f"{_OLDEST} to {_NEWEST}."
        ) from error


def build(model: onnx.ModelProto, weights: Weights, outputs: Sequence[str]) -> torch.fx.GraphModule:
    """Return a module that computes the same as the model.

    Args:
        model: the result of :func:`current`.
        weights: the initializers; a part of the module afterwards.
        outputs: names of the outputs to return, as a tuple.

    Raises:
        UnsupportedOperatorError: a node cannot be trained; the error names the first one.
    """
    builder = _Builder(model, weights)
    for node in model.graph.node:
        builder.add(node)
    builder.graph.output(tuple(builder.tensor(name) for name in outputs))
    module = torch.fx.GraphModule(builder.root, builder.graph)
    module.train()
    return module


class _Builder:
    """A graph of PyTorch that is built node by node."""

    def __init__(self, model: onnx.ModelProto, weights: Weights) -> None:
        self.graph = torch.fx.Graph()
        self.root = torch.nn.Module()
        self.root.add_module("weights", weights)
        self._weights = weights
        self._values: dict[str, Any] = {"": None}
        self._constants: dict[str, np.ndarray[Any, Any]] = dict(weights.constants)
        initial = {one.name for one in model.graph.initializer}
        self._read = {name for node in model.graph.node for name in node.input}
        self._read |= {value.name for value in model.graph.output}
        for index, value in enumerate(v for v in model.graph.input if v.name not in initial):
            self._values[value.name] = self.graph.placeholder(f"input_{index}")

    def add(self, node: onnx.NodeProto) -> None:
        """Translate one node."""
        if node.op_type == "Constant":
            self._constants[node.output[0]] = _constant(node)
            return
        if node.op_type == "Range" and all(name in self._constants for name in node.input):
            given = [self._constants[name] for name in node.input]
            self._constants[node.output[0]] = np.arange(*(one.item() for one in given), dtype=given[0].dtype)
            return
        if node.op_type == "Dropout" and not node.domain:
            self._values[node.output[0]] = self._translate_dropout(node)
            return
        read = max((i + 1 for i, name in enumerate(node.output) if name in self._read), default=0)
        if not read:
            return
        function, attributes = _operator(node, read)
        inputs = [self._input(node, position) for position in range(len(node.input))]
        _check_call(node, function, inputs, attributes)
        result = self.graph.call_function(function, tuple(inputs), attributes)
        if read == 1 and node.op_type not in _TUPLES:
            self._values[node.output[0]] = result
            return
        for index, name in enumerate(node.output):
            if name in self._read:
                self._values[name] = self.graph.call_method("__getitem__", (result, index))

    def tensor(self, name: str) -> torch.fx.Node:
        """Return the value of this name, as a tensor."""
        if name not in self._values and name in self._constants:
            return self.graph.get_attr(f"weights.{self._weights.add_constant(name, self._constants[name])}")
        value = self._value(name)
        assert isinstance(value, torch.fx.Node)
        return value

    def _value(self, name: str) -> Any:
        """Return a value: a node, numbers for small constants of int64, ``None`` for an omitted input."""
        if name in self._values:
            return self._values[name]
        if name in self._weights.attributes:
            self._values[name] = self.graph.get_attr(f"weights.{self._weights.attributes[name]}")
            return self._values[name]
        constant = self._constants[name]
        if constant.dtype == np.int64 and constant.ndim <= 1 and constant.size <= _MOST_NUMBERS:
            return constant.tolist()
        return self.tensor(name)

    def _input(self, node: onnx.NodeProto, position: int) -> Any:
        name = node.input[position]
        constant = self._constants.get(name)
        if constant is not None and constant.size == 1 and position in _NUMBERS.get(node.op_type, ()):
            return constant.item()
        return self._value(name)

    def _translate_dropout(self, node: onnx.NodeProto) -> Any:
        """Translate Dropout; without ``training_mode`` it is the identity."""
        _refuse(node, any(name in self._read for name in node.output[1:]), "its mask is read")
        given = [self._constants.get(name) for name in node.input[1:]]
        _refuse(node, any(v is None and n for v, n in zip(given, node.input[1:], strict=True)), "it varies")
        numbers = [None if value is None else value.item() for value in given]
        ratio = numbers[0] if numbers and numbers[0] is not None else 0.5
        if len(numbers) < 2 or not numbers[1]:
            return self._value(node.input[0])
        name = f"dropout_{len(list(self.root.children()))}"
        self.root.add_module(name, Dropout(ratio))
        return self.graph.call_module(name, (self._value(node.input[0]),))


def _operator(node: onnx.NodeProto, read: int) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the function of a node, of whose outputs `read` are read, and its attributes."""
    name = f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
    function = OPERATORS.get(name)
    if function is None:
        raise UnsupportedOperatorError(
            f"The ONNX model has the operator {name} (node {node.name!r}), which is not trained; allowed are "
            f"{len(OPERATORS)} operators, see docs/orttrainer.md. Give the torch.nn.Module that it was "
            f"made of."
        )
    attributes = {one.name: _attribute(node, one) for one in node.attribute}
    for name, value in (("count", read), ("declared", len(node.output))):
        if name in inspect.signature(function).parameters:
            attributes[name] = value
    return function, attributes


def _attribute(node: onnx.NodeProto, attribute: onnx.AttributeProto) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    if attribute.type == onnx.AttributeProto.STRING:
        return value.decode()
    if attribute.type == onnx.AttributeProto.TENSOR:
        return onnx.numpy_helper.to_array(value).reshape(-1).tolist()[0], value.data_type
    if attribute.type in (onnx.AttributeProto.INTS, onnx.AttributeProto.FLOATS):
        return list(value)
    simple = attribute.type in (onnx.AttributeProto.INT, onnx.AttributeProto.FLOAT)
    _refuse(node, not simple, f"its attribute {attribute.name!r} is a graph or a list of texts")
    return value


def _check_call(
    node: onnx.NodeProto, function: Callable[..., Any], inputs: list[Any], attributes: Mapping[str, Any]
) -> None:
    try:
        inspect.signature(function).bind(*inputs, **attributes)
    except TypeError as error:
        _refuse(node, True, str(error))


def _refuse(node: onnx.NodeProto, wrong: bool, why: str) -> None:
    if wrong:
        raise UnsupportedOperatorError(
            f"The ONNX model's node {node.name!r} ({node.op_type}) is not trained: {why}. Export the "
            f"model without "
            f"it, or give the torch.nn.Module that it was made of."
        )


def _constant(node: onnx.NodeProto) -> np.ndarray[Any, Any]:
    """Return the value of a Constant node."""
    (attribute,) = node.attribute
    value = onnx.helper.get_attribute_value(attribute)
    kinds = {
        "value_int": np.int64,
        "value_ints": np.int64,
        "value_float": np.float32,
        "value_floats": np.float32,
    }
    if attribute.name == "value":
        return np.array(onnx.numpy_helper.to_array(value))
    _refuse(node, attribute.name not in kinds, f"it has {attribute.name}")
    return np.array(value, dtype=kinds[attribute.name])
