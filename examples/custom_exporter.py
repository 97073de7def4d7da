"""Map a custom Function to ONNX operators: an inference graph then needs no Python at all.

Without an exporter, a ``PythonOp`` calls the Function from the graph. An exporter maps the Function to
operators that compute the same, which replace the call. In training ``gradient="function"`` keeps the
Function's own backward. Run it with ``python examples/custom_exporter.py``. It prints:

    before: 3 nodes, 1 calls into Python
      Gemm       [batch, 16]
      PythonOp   [batch, 16]
      Gemm       [batch, 4]
    after: 7 nodes, 0 calls into Python
      Gemm       [batch, 16]
      Constant   []
      Mul        [batch, 16]
      Softplus   [batch, 16]
      Tanh       [batch, 16]
      Mul        [batch, 16]
      Gemm       [batch, 4]
    largest difference to eager: 1.2e-07
"""

from __future__ import annotations

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
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Mish.apply(self.first(x), 1.5))


def map_mish(g: torch2ort.GraphBuilder, x: torch2ort.GraphValue, beta: float) -> torch2ort.GraphValue:
    """Add the operators that compute :class:`Mish`; ``beta`` is the number in the model's call."""
    return g.op("Mul", x, g.op("Tanh", g.op("Softplus", g.op("Mul", x, beta))))


def show(title: str, exported: torch2ort.ExportedModel) -> None:
    """Print each node with the shape of its result."""
    graph = exported.proto.graph
    shapes = {v.name: v.type.tensor_type.shape.dim for v in (*graph.value_info, *graph.output)}
    print(f"{title}: {len(graph.node)} nodes, {len(exported.python_ops)} calls into Python")
    for node in graph.node:
        sizes = [d.dim_param or str(d.dim_value) for d in shapes[node.output[-1]]]
        print(f"  {node.op_type:10} [{', '.join(sizes)}]")


if __name__ == "__main__":
    torch.manual_seed(1)
    model, x = Model().eval(), torch.randn(3, 8)
    show("before", torch2ort.export(model, x, dynamic_shapes={"x": {0: "batch"}}))
    torch2ort.register_exporter(Mish, map_mish, gradient="function")
    exported = torch2ort.export(model, x, dynamic_shapes={"x": {0: "batch"}})
    show("after", exported)
    x = torch.randn(7, 8)
    print(f"largest difference to eager: {(exported(x) - model(x)).abs().max():.1e}")
