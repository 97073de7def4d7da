"""First steps of a new user of the wheel, with an onnxruntime and no test tools: export, save, load, run."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import onnxruntime
import torch

import torch2ort


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * 0.5, None


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x):
        return torch.relu(Half.apply(self.linear(x), 0.5))


def main() -> None:
    """Run all of it in the current folder; a difference is an AssertionError."""
    assert Path(torch2ort.__file__).is_relative_to(sys.prefix), f"not the installed one: {torch2ort.__file__}"
    model, x = Model().eval(), torch.randn(2, 4)
    exported = torch2ort.export(model, x)
    torch.testing.assert_close(exported(x), model(x).detach())
    exported.save("model.onnx")
    torch.testing.assert_close(torch2ort.load("model.onnx", functions=[Half])(x), model(x).detach())

    torch2ort.register_function(Half)
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(torch2ort.custom_ops_library_path())
    session = onnxruntime.InferenceSession("model.onnx", options, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), model(x).detach())

    info = subprocess.run(
        [sys.executable, "-m", "torch2ort", "info", "model.onnx"], capture_output=True, text=True, check=True
    )
    assert "__main__.Half" in info.stdout, info.stdout
    version = importlib.metadata.version("torch2ort")
    print(f"torch2ort {version} works on onnxruntime {onnxruntime.__version__}")


if __name__ == "__main__":
    main()
