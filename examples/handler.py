"""A handler maps a library's Functions to ONNX, without a change to the library or the model.

It refers to the Functions by name, so the library is not imported. A Function without a mapping stays a call.
Run it with ``python examples/handler.py``. It prints:

    with the handler:    Gemm HardSigmoid Mul PythonOp Mul
    outputs: 0e+00 from eager PyTorch
    gradients: 0e+00 from eager PyTorch
    without the handler: Gemm PythonOp Mul PythonOp Mul
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import torch2ort


class HardGate(torch.autograd.Function):
    """An example of a library's Function: a gate clamped to [0, 1] that passes every gradient through."""

    @staticmethod
    def forward(ctx, x: Tensor, slope: float) -> Tensor:
        ctx.slope = slope
        return (x * slope + 0.5).clamp(0, 1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.slope, None


class Model(nn.Module):
    """Two gates, one of which the handler maps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x * HardGate.apply(x, 0.25) * HardGate.apply(x, -1.0)


# The handler. HardGate's backward is not the derivative of its forward, so training keeps the Function's own.
@torch2ort.register_exporter(f"{__name__}.HardGate", gradient="function")
def gate(g: Any, x: Any, slope: float) -> Any:
    """Map the gate to ONNX's own operator, which requires a positive slope."""
    if slope <= 0:
        return None
    return g.op("HardSigmoid", x, alpha=slope, beta=0.5)


if __name__ == "__main__":
    torch.manual_seed(1)
    model, x = Model(), torch.randn(3, 4)
    sizes = {"x": {0: "batch"}}
    exported = torch2ort.export(model.eval(), x, dynamic_shapes=sizes)
    print("with the handler:   ", *(node.op_type for node in exported.proto.graph.node))
    other = torch.randn(7, 4)
    print(f"outputs: {(exported(other) - model(other)).abs().max():.0e} from eager PyTorch")

    gradients = []
    for module in (model.train(), torch2ort.ORTModule(model)):
        model.zero_grad()
        module(other).square().sum().backward()
        gradients.append(model.linear.weight.grad.clone())
    print(f"gradients: {(gradients[0] - gradients[1]).abs().max():.0e} from eager PyTorch")

    torch2ort.unregister(f"{__name__}.HardGate")
    plain = torch2ort.export(model.eval(), x, dynamic_shapes=sizes)
    print("without the handler:", *(node.op_type for node in plain.proto.graph.node))
