"""Declare the output shapes of a custom Function, so that varying sizes propagate through it by name.

This Function computes in numpy, so its sizes cannot be traced. Behind it every size is unknown, and operators
there need more nodes, or cannot be exported. A shape inferer, one small callable, solves that.

Run it with ``python examples/shape_inferer.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import torch2ort


class Windows(torch.autograd.Function):
    """All windows of ``length`` steps, by numpy: ``[batch, time] -> [batch, windows, length]``."""

    @staticmethod
    def forward(ctx, signal: Tensor, length: int) -> Tensor:
        ctx.time = signal.shape[1]
        views = np.lib.stride_tricks.sliding_window_view(signal.detach().numpy(), length, axis=1)
        return torch.from_numpy(np.ascontiguousarray(views))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        batch, windows, length = grad.shape
        signal = grad.new_zeros(batch, ctx.time)
        for offset in range(length):
            signal[:, offset : offset + windows] += grad[:, :, offset]
        return signal, None


class Model(nn.Module):
    """Each window attends to all others; one number comes out per window."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.score = nn.Linear(8, 1)

    def forward(self, signal: Tensor) -> Tensor:
        windows = Windows.apply(signal, 4)
        hidden = self.embed(windows.reshape(-1, 4)).unflatten(0, windows.shape[:2])
        weights = torch.softmax(hidden @ hidden.transpose(1, 2), -1)
        return self.score(weights @ hidden).squeeze(-1)


def infer_windows(node: Any, shapes: list[Any], dtypes: list[Any]) -> Any:
    """``time`` steps have ``time - length + 1`` windows; sizes are numbers or sympy expressions."""
    batch, time = shapes[0]
    length = node.arguments[1]
    return [[batch, time - length + 1, length]], dtypes


def show(title: str, exported: torch2ort.ExportedModel) -> None:
    """Print each node with the shapes of its outputs, and the number of unnamed sizes."""
    graph = exported.proto.graph
    values = {v.name: v for v in (*graph.input, *graph.value_info, *graph.output)}
    unknown: set[str] = set()
    lines = []
    for node in graph.node:
        made = [values[name].type.tensor_type.shape.dim for name in node.output if name in values]
        sizes = [[d.dim_param or str(d.dim_value) for d in dims] for dims in made]
        lines.append(f"  {node.op_type:10} {' '.join(f'[{chr(44).join(s)}]' for s in sizes)}")
        unknown |= {size for s in sizes for size in s if size[:1] in "u_" and size[1:].isalnum()}
    print(f"{title}: {len(graph.node)} nodes, {len(unknown)} sizes without a name")
    print("\n".join(lines))


def main() -> None:
    """Export without and with the inferer, and compare with eager at other sizes."""
    torch.manual_seed(1)
    model, signal = Model().eval(), torch.randn(2, 10)
    shapes = {"signal": {0: torch.export.Dim("batch"), 1: torch.export.Dim("time", min=5)}}
    show("before", torch2ort.export(model, signal, dynamic_shapes=shapes))

    torch2ort.register_shape_inferer(Windows, infer_windows)
    exported = torch2ort.export(model, signal, dynamic_shapes=shapes)
    show("after", exported)
    other = torch.randn(3, 25)
    print(f"largest difference to eager: {(exported(other) - model(other)).abs().max():.1e}")


if __name__ == "__main__":
    main()
