"""Runs PythonOp nodes on the device of tests.stock.fake_runtime, and prints results and events as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import onnx
import torch

import torch2ort
from tests.stock.fake_runtime import Device, Node, Runtime, Value, lend_device_to_torch
from torch2ort.runtime import stock

device = Device()
kept: list[torch.Tensor] = []
hosts: list[torch.Tensor] = []


@torch2ort.register_function
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        with device.work("forward"):
            return x * factor


@torch2ort.register_function
class Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if type(x) is torch.Tensor:
            raise ValueError("mine")
        return x * 1


@torch2ort.register_function
class Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        kept.append(x)
        with device.work("forward"):
            return x + 1


@torch2ort.register_function
class OnHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        with device.work("forward"):
            hosts.append(x + 1)
        return hosts[-1]


class Call(torch.nn.Module):
    def __init__(self, function: Any, *arguments: Any) -> None:
        super().__init__()
        self.function, self.arguments = function, arguments

    def forward(self, x):
        return self.function.apply(x, *self.arguments) * 1.0


def node_of(function: Any, *arguments: Any, writes_context: bool = False) -> Node:
    """The PythonOp node of an export."""
    proto = torch2ort.export(Call(function, *arguments).eval(), torch.ones(2, 3)).proto
    (node,) = [n for n in proto.graph.node if n.op_type == "PythonOp"]
    if not writes_context:
        node.output[0] = ""
    inputs = [onnx.TensorProto.FLOAT] * len(node.input)
    return Node(node, inputs, outputs=[onnx.TensorProto.INT64, onnx.TensorProto.FLOAT])


def events_of(call: Callable[..., list[Value]], *inputs: Value) -> tuple[list[Value], list[str], str]:
    """Return a call's results, the events on the device, and its error."""
    device.events.clear()
    try:
        return call(*inputs), device.events[:], ""
    except RuntimeError as error:
        return [], device.events[:], str(error)


def calls(runtime: Runtime, node: Node) -> dict[str, Any]:
    """Two calls of a Function with an output that is read as the context."""
    call = runtime.make(node)
    x, y = torch.randn(2, 3), torch.randn(4, 3)
    _, first, _ = events_of(call, device.put(x))
    (context, result), second, error = events_of(call, device.put(y))
    equal = torch.equal(device.get(result), y * 3.0)
    return {"first": first, "second": second, "error": error, "equal": equal, "context": list(context.sizes)}


def one_call(runtime: Runtime, node: Node) -> dict[str, Any]:
    """A Function's first call."""
    _, events, error = events_of(runtime.make(node), device.put(torch.ones(2, 3)))
    return {"events": events, "error": error}


def keeping(runtime: Runtime, node: Node) -> dict[str, Any]:
    """Calls of a Function that keeps its arguments, which the runtime writes over afterwards."""
    call = runtime.make(node)
    given = [torch.randn(2, 3) for _ in range(3)]
    kept.clear()
    for x in given:
        value = device.put(x)
        call(value)
        device.fill(value, 0xFF)
    return {"intact": [torch.equal(a, b) for a, b in zip(kept, given, strict=True)]}


def refusal(runtime: Runtime, node: Node) -> dict[str, Any]:
    """A node on the device before ``try_cuda`` was called."""
    try:
        runtime.make(node)
    except RuntimeError as error:
        return {"error": str(error)}
    return {"error": ""}


def main() -> None:
    """Print the result of each of the scenarios above."""
    scale = node_of(Scale, 3.0, writes_context=True)
    scenarios = {
        "calls": (calls, scale),
        "failure": (one_call, node_of(Fail)),
        "keeping": (keeping, node_of(Keep)),
        "other device": (one_call, node_of(OnHost)),
    }
    runtime = Runtime(device)
    found = {"refusal": refusal(runtime, scale)}
    stock.try_cuda()
    lend_device_to_torch(device, on_host=lambda tensor: any(tensor is host for host in hosts))
    for name, (scenario, node) in scenarios.items():
        found[name] = scenario(runtime, node)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
