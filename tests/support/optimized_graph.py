"""The graph that a training session runs in the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import torch

import torch2ort


def optimized_nodes(model: torch.nn.Module, folder: Path, *arguments: Any) -> list[onnx.NodeProto]:
    """The nodes after ONNX Runtime's optimisers, of one step that sums the model's first output.

    Args:
        model: is changed: it has gradients afterwards.
        folder: an empty one.
        arguments: the model's.
    """
    result = torch2ort.ORTModule(model, options=torch2ort.Options(save_onnx_dir=folder))(*arguments)
    (result[0] if isinstance(result, tuple) else result).sum().backward()
    (file,) = folder.glob("*_optimized.onnx")
    return list(onnx.load(file).graph.node)
