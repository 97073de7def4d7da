"""Backward operators of PyTorch, and others that a step needs, as ONNX's own operators.

What torch itself takes apart into operators that ONNX has is left to it.
"""

import importlib

from torch2ort.training_files.decompositions.registry import STEP

__all__ = ["STEP"]

# Each fills the table when it is imported.
for _name in (
    "convolution",
    "elementwise",
    "indexing",
    "losses",
    "pooling",
    "reduction",
    "upsample_backward",
):
    importlib.import_module(f"{__name__}.{_name}")
