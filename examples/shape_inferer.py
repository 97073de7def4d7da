"""Declare the output shapes of a custom Function, so that varying sizes propagate through it by name.

This Function computes in numpy, so its sizes cannot be traced. Behind it every size is unknown, and operators
there need more nodes, or cannot be exported. A shape inferer, one small callable, solves that.
Run it with ``python examples/shape_inferer.py``. It prints:

    before: 27 nodes, 3 sizes without a name
      PythonOp   [u0,u1,u2]
      Softmax    [u0,u1,u1]
    after: 29 nodes, 0 sizes without a name
      PythonOp   [batch,time-3,4]
      Softmax    [batch,time-3,time-3]
    largest difference to eager: 6.0e-08
"""

from __future__ import annotations

import re

import numpy as np
import torch
from torch import Tensor, nn

import torch2ort


class Windows(torch.autograd.Function):
    """All windows of ``length`` steps, by numpy: ``[batch, time] -> [batch, windows, length]``."""

    @staticmethod
    def forward(ctx, signal: Tensor, length: int) -> Tensor:
        views = np.lib.stride_tricks.sliding_window_view(signal.detach().numpy(), length, axis=1)
        return torch.from_numpy(np.ascontiguousarray(views))


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


def infer_windows(node, shapes, dtypes):
    """``time`` steps have ``time - length + 1`` windows; sizes are numbers or sympy expressions."""
    batch, time = shapes[0]
    length = node.arguments[1]
    return [[batch, time - length + 1, length]], dtypes


def show(title: str, exported: torch2ort.ExportedModel) -> None:
    """Print the number of unnamed sizes in a graph, and the shapes of two results."""
    graph = exported.proto.graph
    values = {v.name: v.type.tensor_type.shape.dim for v in (*graph.value_info, *graph.output)}
    sizes = {name: [d.dim_param or str(d.dim_value) for d in dims] for name, dims in values.items()}
    unknown = set(re.findall(r"\bu\d+", str(sizes)))
    print(f"{title}: {len(graph.node)} nodes, {len(unknown)} sizes without a name")
    for node in graph.node:
        if node.op_type in ("PythonOp", "Softmax"):
            print(f"  {node.op_type:10} [{','.join(sizes[node.output[-1]])}]")


if __name__ == "__main__":
    torch.manual_seed(1)
    model, signal = Model().eval(), torch.randn(2, 10)
    shapes = {"signal": {0: torch.export.Dim("batch"), 1: torch.export.Dim("time", min=5)}}
    show("before", torch2ort.export(model, signal, dynamic_shapes=shapes))
    torch2ort.register_shape_inferer(Windows, infer_windows)
    exported = torch2ort.export(model, signal, dynamic_shapes=shapes)
    show("after", exported)
    other = torch.randn(3, 25)
    print(f"largest difference to eager: {(exported(other) - model(other)).abs().max():.1e}")
