"""torch2ort's own translations from ATen to ONNX, one file per concern.

They take precedence over torch.onnx's, where those are wrong, slow, or have no gradient.
"""

import importlib

from torch2ort.symbolics.translations.registry import translation_table

__all__ = ["translation_table"]

# Each module fills the table when it is imported.
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
    "rows",
):
    importlib.import_module(f"{__name__}.{_name}")
