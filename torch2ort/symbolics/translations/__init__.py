"""Translations of our own from ATen to ONNX, one file a concern.

They stand in front of torch.onnx's, where those are wrong, slow, or have no gradient.
"""

import importlib

from torch2ort.symbolics.translations.registry import translation_table

__all__ = ["translation_table"]

# Each fills the table when it is imported.
for _name in (
    "activation",
    "basics",
    "convolution",
    "fourier",
    "refinements",
    "loss",
    "normalization",
    "pool",
    "recurrent",
    "data_dependent_sizes",
):
    importlib.import_module(f"{__name__}.{_name}")
