"""Decompositions of ATen operators that every graph uses, on every Target.

Each is plain PyTorch code, traced into the program. Values and gradients equal the operator's own,
also where PyTorch's reference decomposition would produce a NaN gradient from the branch not taken.
"""

import importlib

from torch2ort.program.decomposition_table import EVERY, EXPORTED

__all__ = ["EVERY", "EXPORTED"]

# Each module fills the table when it is imported.
for _name in (
    "arithmetic",
    "attention",
    "class_losses",
    "dropout",
    "norms",
    "random",
    "scalar_precision",
    "scatter",
    "shape",
    "addmm",
    "zero_dim",
):
    importlib.import_module(f"{__name__}.{_name}")
