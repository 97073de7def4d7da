"""Map a custom Function to ONNX operators: an inference graph then needs no Python at all.

Without an exporter, a ``PythonOp`` calls the Function from the graph. An exporter maps the Function to
operators that compute the same, which replace the call. In training this one keeps the Function's own
backward behind the operators.

Run it with ``python examples/custom_exporter.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import torch2ort


class Mish(torch.autograd.Function):
    """``x * tanh(softplus(x))`` that saves only its input."""

    @staticmethod
    def forward(ctx, x: Tensor, beta: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.beta = beta
        return x * torch.tanh(nn.functional.softplus(beta * x))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        gate = torch.tanh(nn.functional.softplus(ctx.beta * x))
        return grad * (gate + x * (1 - gate * gate) * ctx.beta * torch.sigmoid(ctx.beta * x)), None


class Model(nn.Module):
    """A Function between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Mish.apply(self.first(x), 1.5))


def map_mish(g: torch2ort.GraphBuilder, x: torch2ort.GraphValue, beta: float) -> Any:
    """Add the operators that compute :class:`Mish`; ``beta`` is the number in the model's call."""
    return g.op("Mul", x, g.op("Tanh", g.op("Softplus", g.op("Mul", x, beta))))


def show(title: str, exported: torch2ort.ExportedModel) -> None:
    """Print each node with the shapes of its outputs."""
    graph = exported.proto.graph
    values = {v.name: v for v in (*graph.input, *graph.value_info, *graph.output)}
    print(f"{title}: {len(graph.node)} nodes, {len(exported.python_ops)} calls into Python")
    for node in graph.node:
        made = [values[name].type.tensor_type.shape.dim for name in node.output if name in values]
        shapes = [f"[{', '.join(d.dim_param or str(d.dim_value) for d in dims)}]" for dims in made]
        print(f"  {node.op_type:10} {' '.join(shapes)}")


def main() -> None:
    """Export without and with the exporter, compare with eager, then train a step."""
    torch.manual_seed(1)
    model, x = Model(), torch.randn(3, 8)
    shapes = {"x": {0: torch.export.Dim("batch")}}
    show("before", torch2ort.export(model.eval(), x, dynamic_shapes=shapes))

    torch2ort.register_exporter(Mish, map_mish, gradient="function")
    exported = torch2ort.export(model.eval(), x, dynamic_shapes=shapes)
    show("after", exported)
    longer = torch.randn(7, 8)
    print(f"largest difference to eager: {(exported(longer) - model(longer)).abs().max():.1e}")

    module = torch2ort.ORTModule(model.train())
    module(x).square().mean().backward()
    gradient = model.first.weight.grad.clone()
    model.zero_grad()
    model(x).square().mean().backward()
    print(f"largest difference of a gradient: {(gradient - model.first.weight.grad).abs().max():.1e}")


if __name__ == "__main__":
    main()
