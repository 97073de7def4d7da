"""Decompositions to ONNX's own operators, of PyTorch's backward operators and others that a step needs.

Operators that torch itself decomposes to operators of ONNX are not included.
"""

import importlib

from torch2ort.training_files.decompositions.registry import STEP

__all__ = ["STEP"]

# Each module fills the table when it is imported.
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
