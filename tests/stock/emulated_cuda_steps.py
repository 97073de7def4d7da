"""Runs training steps (PythonOp, then PythonOpGrad) on the device of tests.stock.fake_runtime.

Prints results and events as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import onnx
import torch

from tests.runtime_ext.calls import make_site
from tests.stock.emulated_cuda_calls import device, events_of
from tests.stock.fake_runtime import Node, Runtime, Value, lend_device_to_torch, on_device
from torch2ort.kernels.functions import AtenKernel, encode_call
from torch2ort.pythonop.interception import internal_site
from torch2ort.pythonop.native import native
from torch2ort.pythonop.site import TENSOR, Result, TensorType
from torch2ort.runtime import stock
from torch2ort.runtime.contexts import contexts_in
from torch2ort.runtime.native_sites import runs_directly
from torch2ort.runtime.ortvalues import to_capsule

FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
hosts: list[torch.Tensor] = []
kept: list[torch.Tensor] = []
raised: list[Exception] = []


class Product(torch.autograd.Function):
    """Saves both of its arguments, and its result."""

    @staticmethod
    def forward(ctx, x, y):
        with device.work("forward"):
            product = x * y
        ctx.save_for_backward(x, y, product)
        return product

    @staticmethod
    def backward(ctx, grad):
        x, y, product = ctx.saved_tensors
        with device.work("backward"):
            return grad * y + 0 * product, grad * x


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        with device.work("forward"):
            return x * 2

    @staticmethod
    def backward(ctx, grad):
        with device.work("backward"):
            return grad * 2


class LeavesOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        with device.work("forward"):
            return x * y

    @staticmethod
    def backward(ctx, grad):
        with device.work("backward"):
            return grad * 1, None


class Twins(torch.autograd.Function):
    """Has a second output, whose gradient may be missing."""

    @staticmethod
    def forward(ctx, x):
        with device.work("forward"):
            return x * 2, x * 3

    @staticmethod
    def backward(ctx, first, second):
        with device.work("backward"):
            return first * 2 + second * 3


class Raises(Double):
    @staticmethod
    def backward(ctx, grad):
        raised.append(ValueError("mine"))
        raise raised[-1]


class GivesTheHosts(Double):
    @staticmethod
    def backward(ctx, grad):
        with device.work("backward"):
            hosts.append(grad * 2)
        return hosts[-1]


class KeepsGradients(Double):
    @staticmethod
    def backward(ctx, grad):
        kept.append(grad)
        with device.work("backward"):
            return grad * 2


class BeginsToKeep(Double):
    @staticmethod
    def backward(ctx, grad):
        if ctx.late:
            kept.append(grad)
        with device.work("backward"):
            return grad * 2

    @staticmethod
    def forward(ctx, x):
        BeginsToKeep.calls += 1
        ctx.late = BeginsToKeep.calls > 2  # the first run is that of the site's creation
        with device.work("forward"):
            return x * 2

    calls = 0


class Step:
    """A forward and a backward node over the same Functions.

    Args:
        runtime: the runtime that makes the kernels.
        callees: the callees of the forward and the backward node.
        counts: numbers of tensor arguments, of outputs, and of arguments that need a gradient.
        gradients: positions of the outputs that have a gradient; all by default.
    """

    def __init__(
        self,
        runtime: Runtime,
        callees: Sequence[Any],
        counts: tuple[int, int, int],
        gradients: Sequence[int] | None = None,
    ) -> None:
        given, made, needed = counts
        gradients = list(range(made)) if gradients is None else list(gradients)
        forward = _node("PythonOp", given, made, 2)
        backward = _node("PythonOpGrad", len(gradients), needed, 2, gradients=gradients)
        graph = onnx.helper.make_graph([forward, backward], "step", [], [])
        names = dict.fromkeys(("PythonOp", "PythonOpGrad"), "mine")
        self._bound = stock.bind_callees(graph, dict(zip(names, callees, strict=True)), names)
        self.forward, self.backward = (
            runtime.make(Node(node, [FLOAT] * len(node.input), [INT64] + [FLOAT] * (len(node.output) - 1)))
            for node in graph.node
        )


def _node(kind: str, inputs: int, outputs: int, rank: int, **attributes: Any) -> onnx.NodeProto:
    made = onnx.helper.make_node(
        kind,
        [f"{kind}_in{i}" for i in range(inputs)],
        ["", *(f"{kind}_out{i}" for i in range(outputs))],
        kind,
        domain="com.microsoft",
        output_tensor_types=[FLOAT] * outputs,
        output_tensor_ranks=[rank] * outputs,
        **attributes,
    )
    return made


def parameter() -> torch.Tensor:
    return torch.randn(2, 3, requires_grad=True)


def run_step(
    step: Step, *inputs: torch.Tensor, grads: Sequence[torch.Tensor], run: Any = None
) -> dict[str, Any]:
    """Run one step, in which the runtime overwrites the inputs between forward and backward."""
    run = native.Run() if run is None else run  # an empty list is false
    values = [device.put(x.detach()) for x in inputs]
    with contexts_in(run, without_grad=True):
        outputs, forward, error = events_of(step.forward, *values)
        for value in values:
            device.fill(value, 0xFF)
        given = [device.put(grad) for grad in grads]
        gradients, backward, failure = events_of(step.backward, *given)
    for value in given:
        device.fill(value, 0xFF)
    return {
        "forward": forward,
        "backward": backward,
        "error": error or failure,
        "outputs": outputs,
        "gradients": gradients,
        "undefined": [argument for _, argument in run.undefined],
    }


def told(
    found: dict[str, Any], outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
) -> dict[str, Any]:
    """Return the results as JSON, with whether values equal eager PyTorch's."""

    def equal(values: Sequence[Value], expected: Sequence[torch.Tensor]) -> bool:
        pairs = zip(values, expected, strict=True)
        return all(torch.equal(device.get(value), tensor.detach()) for value, tensor in pairs)

    return {
        **found,
        "outputs": equal(found["outputs"], outputs),
        "gradients": equal(found["gradients"], gradients),
    }


def steps(runtime: Runtime) -> list[dict[str, Any]]:
    """Two steps of a Function that saves its arguments and its result."""
    site = make_site(Product, parameter(), parameter())
    step = Step(runtime, (site, site), (2, 1, 2))
    found = []
    for _ in range(2):
        x, y, grad = parameter(), parameter(), torch.randn(2, 3)
        result = run_step(step, x, y, grads=[grad])
        found.append(told(result, [x * y], [grad * y, grad * x]))
    return found


def chain(runtime: Runtime) -> list[dict[str, Any]]:
    """Two steps of two Functions in a row, which are one node in each direction."""
    members = (make_site(Double, parameter()), make_site(Product, parameter(), parameter()))
    made = [native.Chain(key=f"chain {i}", sites=members, links=(-1, 0)) for i in range(2)]
    step = Step(runtime, made, (2, 1, 2))
    found = []
    for _ in range(2):
        x, y, grad = parameter(), parameter(), torch.randn(2, 3)
        result = run_step(step, x, y, grads=[grad])
        found.append(told(result, [x * 2 * y], [grad * y * 2, grad * (x * 2)]))
    return found


def left_out(runtime: Runtime) -> dict[str, Any]:
    """A backward that returns no gradient for an argument that needs one."""
    site = make_site(LeavesOut, parameter(), parameter())
    x, y, grad = parameter(), parameter(), torch.randn(2, 3)
    result = run_step(Step(runtime, (site, site), (2, 1, 2)), x, y, grads=[grad])
    return told(result, [x * y], [grad, torch.zeros(2, 3)])


def missing(runtime: Runtime) -> dict[str, Any]:
    """A backward without the gradient of one output: zeros are made on the device."""
    site = make_site(Twins, parameter())
    x, grad = parameter(), torch.randn(2, 3)
    step = Step(runtime, (site, site), (1, 2, 1), gradients=[1])
    return told(run_step(step, x, grads=[grad]), [x * 2, x * 3], [grad * 3])


def failure(runtime: Runtime) -> dict[str, Any]:
    """A backward that raises."""
    site = make_site(Raises, parameter())
    found = run_step(Step(runtime, (site, site), (1, 1, 1)), parameter(), grads=[torch.ones(2, 3)])
    same = stock.take_error(RuntimeError(found["error"])) is raised[-1]
    return {"backward": found["backward"], "error": found["error"].split(" [")[0], "same": same}


def of_the_host(runtime: Runtime) -> str:
    """A backward that returns a gradient in the host's memory."""
    site = make_site(GivesTheHosts, parameter())
    found = run_step(Step(runtime, (site, site), (1, 1, 1)), parameter(), grads=[torch.ones(2, 3)])
    return found["error"].split(" [")[0]


def keeping(runtime: Runtime) -> list[bool]:
    """Return for each kept gradient whether it is unchanged, though the runtime overwrote its own."""
    site = make_site(KeepsGradients, parameter())
    step, given = Step(runtime, (site, site), (1, 1, 1)), [torch.randn(2, 3) for _ in range(3)]
    kept.clear()
    for grad in given:
        run_step(step, parameter(), grads=[grad])
    return [torch.equal(a, b) for a, b in zip(kept, given, strict=True)]


def late(runtime: Runtime) -> list[str]:
    """The errors of steps, the second of which begins to keep its gradients."""
    site = make_site(BeginsToKeep, parameter())
    step = Step(runtime, (site, site), (1, 1, 1))
    kept.clear()
    return [run_step(step, parameter(), grads=[torch.ones(2, 3)])["error"].split(" [")[0] for _ in range(2)]


def retained(runtime: Runtime) -> dict[str, Any]:
    """Two backwards of one forward."""
    site = make_site(Product, parameter(), parameter())
    step, run = Step(runtime, (site, site), (2, 1, 2)), native.Run()
    run.keeps = True
    x, y, grad = parameter(), parameter(), torch.randn(2, 3)
    run_step(step, x, y, grads=[grad], run=run)
    with contexts_in(run, without_grad=True):
        gradients, events, error = events_of(step.backward, device.put(grad * 2))
    found = {"outputs": [], "gradients": gradients, "backward": events, "error": error}
    return told(found, [], [grad * 2 * y, grad * 2 * x])


def kernel(runtime: Runtime) -> dict[str, Any]:
    """Three calls of an operator of PyTorch that a node on the CPU calls in C++."""
    text = encode_call(torch.ops.aten.sin.default, [{"tensor": 0}], {}, random=False)
    original = AtenKernel.forward

    def forward(*arguments: Any) -> Any:
        with device.work("forward"):
            return original(*arguments)

    AtenKernel.forward = staticmethod(forward)
    called = internal_site(AtenKernel, [text, TENSOR], [False, False], training=False)
    kind = (TensorType(torch.float32, 2),)
    called.result = Result(inputs=kind, outputs=(TENSOR,), tensors=kind, returns_tuple=True)
    direct = runs_directly(called)
    node = _node("PythonOp", 1, 1, 2)
    graph = onnx.helper.make_graph([node], "call", [], [])
    callees = stock.bind_nodes(graph, {"PythonOp": called}, in_place=False)
    call = runtime.make(Node(graph.node[0], [FLOAT], [INT64, FLOAT]))
    found = []
    for _ in range(3):
        x = torch.randn(2, 3)
        (result,), events, _ = events_of(call, device.put(x))
        found.append((events, torch.equal(device.get(result), x.sin())))
    return {
        "direct": direct and isinstance(callees[0], native.DirectCall),
        "calls": found,
    }


def donated(runtime: Runtime) -> str:
    """The error for a value on the device that is donated to a node on the CPU."""
    node = onnx.helper.make_node("Donated", [], ["x"], "x", index=[0])
    call = runtime.make(Node(node, [], [FLOAT]), "CPUExecutionProvider")
    run = native.Run()
    run.donate([on_device(to_capsule(torch.ones(2, 3)))])
    with contexts_in(run, without_grad=True):
        return events_of(call)[2]


def main() -> None:
    """Print the result of each of the scenarios above."""
    runtime = Runtime(device)
    stock.try_cuda()
    lend_device_to_torch(device, on_host=lambda tensor: any(tensor is host for host in hosts))
    scenarios: list[Callable[[Runtime], Any]] = [
        steps, chain, left_out, missing, failure, of_the_host, keeping, late, retained, kernel, donated,
    ]  # fmt: skip
    print(json.dumps({scenario.__name__: scenario(runtime) for scenario in scenarios}))


if __name__ == "__main__":
    main()
