"""Decompositions of ATen operators into operators that onnxruntime-training differentiates right.

Each is plain PyTorch code, traced into the program. Values and gradients equal the operator's own,
also where PyTorch's reference decomposition would give a NaN gradient from the branch not taken.
"""

import importlib

from torch2ort.engines.ort_training.decompositions.table import FOR_GRADIENTS

__all__ = ["FOR_GRADIENTS"]

# Each fills the table when it is imported.
for _name in (
    "activation",
    "arithmetic",
    "indexing",
    "loss",
    "normalization",
    "reduction",
    "regression",
    "shape",
):
    importlib.import_module(f"{__name__}.{_name}")
