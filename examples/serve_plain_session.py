"""Serve a model with a custom Function from a plain onnxruntime.InferenceSession, with any batch size.

A layer rounds its weights to 4 bits, by an autograd Function. The file holds graph and weights. A server
needs the Function's class and torch2ort's operator library, but neither the model's code nor its checkpoint.

Run it with ``python examples/serve_plain_session.py``. It prints:

    classifier.onnx: 8,268 bytes, onnxruntime 1.32.0
    1 rows: as eager PyTorch, to 6e-08
    4 rows: as eager PyTorch, to 6e-08
    64 rows: as eager PyTorch, to 0e+00
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

import torch2ort


class Quantise(torch.autograd.Function):
    """Rounds to 16 steps between -1 and 1; the gradient passes through where no number was clamped."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x.clamp(-1, 1) * 7.5).round() / 7.5

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1)


class Classifier(nn.Module):
    """Two layers, the first with rounded weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight = Quantise.apply(self.first.weight)
        return self.second(torch.relu(nn.functional.linear(x, weight, self.first.bias)))


def serve(path: Path) -> onnxruntime.InferenceSession:
    """Open the file as a server does, which has only the Function's class."""
    torch2ort.register_function(Quantise)
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(torch2ort.custom_ops_library_path())
    return onnxruntime.InferenceSession(str(path), options)


if __name__ == "__main__":
    torch.manual_seed(1)
    model = Classifier().eval()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "classifier.onnx")
        torch2ort.export(model, torch.randn(4, 16), dynamic_shapes={"x": {0: "batch"}}).save(path)
        session = serve(path)
        print(f"{path.name}: {path.stat().st_size:,} bytes, onnxruntime {onnxruntime.__version__}")
    for rows in (1, 4, 64):
        x = torch.randn(rows, 16)
        (served,) = session.run(None, {"x": x.numpy()})
        expected = model(x).detach().numpy()
        np.testing.assert_allclose(served, expected, rtol=1e-4, atol=1e-5)
        print(f"{rows} rows: as eager PyTorch, to {np.abs(served - expected).max():.0e}")
