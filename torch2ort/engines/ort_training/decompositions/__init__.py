"""Decompositions into operators that onnxruntime-training differentiates right.

They are what those of symbolics.decompositions are, which stand behind them.
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
