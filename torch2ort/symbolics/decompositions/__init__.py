"""Decompositions of ATen operators into operators that onnxruntime-training differentiates right.

Each is plain PyTorch code, traced into the program. Values and gradients equal the operator's own,
also where PyTorch's reference decomposition would give a NaN gradient from the branch not taken.
"""

from torch2ort.symbolics.decompositions import activation, attention, dropout, indexing, loss, normalization
from torch2ort.symbolics.decompositions import random as _random
from torch2ort.symbolics.decompositions import reduction
from torch2ort.symbolics.decompositions.registry import Decomposition, decomposition_table

__all__ = ["Decomposition", "decomposition_table"]
del activation, attention, dropout, indexing, loss, normalization, reduction, _random
