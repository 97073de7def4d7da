"""The graph of a training session after ONNX Runtime's optimizations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import torch

import torch2ort


def optimized_nodes(model: torch.nn.Module, folder: Path, *arguments: Any) -> list[onnx.NodeProto]:
    """The nodes after ONNX Runtime's optimizers, of one step that sums the model's first output.

    Args:
        model: the model, which has gradients afterwards.
        folder: an empty folder.
        arguments: the model's arguments.
    """
    result = torch2ort.ORTModule(model, options=torch2ort.Options(save_onnx_dir=folder))(*arguments)
    (result[0] if isinstance(result, tuple) else result).sum().backward()
    (file,) = folder.glob("*_optimized.onnx")
    return list(onnx.load(file).graph.node)
