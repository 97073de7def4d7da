"""Models and graphs that the tests of the operator library share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper

import torch2ort
from tests.support.functions import Square


class Chain(torch.nn.Module):
    """One call of a Function between two operators of PyTorch's."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors):
        result = self.call(*(t * 1 if t.is_floating_point() else t for t in tensors))
        results = result if isinstance(result, tuple) else (result,)
        return tuple(r * 1 if isinstance(r, torch.Tensor) and r.is_floating_point() else r for r in results)


class Squares(torch.nn.Module):
    """One call of Square behind a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return Square.apply(self.linear(x))


@contextlib.contextmanager
def registered(*functions: type[torch.autograd.Function]) -> Iterator[None]:
    """Make Functions resolvable by name inside of the context."""
    for function in functions:
        torch2ort.register_function(function)
    try:
        yield
    finally:
        for function in functions:
            torch2ort.unregister(function)


def plain_options(**settings: Any) -> Any:
    """Session options as a user of a saved file makes them."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    for name, value in settings.items():
        setattr(options, name, value)
    options.register_custom_ops_library(torch2ort.custom_ops_library_path())
    return options


def plain_session(model: Any, **settings: Any) -> Any:
    """An InferenceSession made without torch2ort, from a path or a model."""
    if isinstance(model, onnx.ModelProto):
        model = model.SerializeToString()
    return onnxruntime.InferenceSession(model, plain_options(**settings), providers=["CPUExecutionProvider"])


def run(session: Any, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """One run on numpy arrays."""
    names = [value.name for value in session.get_inputs()]
    feeds = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
    return [torch.from_numpy(array) for array in session.run(None, feeds)]


def python_op(function: type[torch.autograd.Function], *arguments: Any) -> onnx.NodeProto:
    """The PythonOp node of one call; tensor arguments become inputs."""
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]

    def call(*given):
        supply = iter(given)
        return function.apply(*(next(supply) if isinstance(a, torch.Tensor) else a for a in arguments))

    exported = torch2ort.export(Chain(call).eval(), tuple(tensors))
    (node,) = (n for n in exported.proto.graph.node if n.op_type == "PythonOp")
    return node


def value(name: str, kind: int = TensorProto.FLOAT, shape: list[Any] | None = None) -> onnx.ValueInfoProto:
    """A graph input or output."""
    return helper.make_tensor_value_info(name, kind, shape)


def renamed(node: onnx.NodeProto, inputs: list[str], outputs: list[str], name: str) -> onnx.NodeProto:
    """A copy of ``node`` between other values."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.name = name
    del copy.input[:], copy.output[:]
    copy.input.extend(inputs)
    copy.output.extend(outputs)
    return copy


def graph_model(nodes: list[onnx.NodeProto], inputs: list[Any], outputs: list[Any]) -> onnx.ModelProto:
    """A model of the given nodes."""
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "graph", inputs, outputs)
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)
