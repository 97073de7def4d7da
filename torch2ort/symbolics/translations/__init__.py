"""Translations of our own from ATen to ONNX, one file a concern.

They stand in front of torch.onnx's, where those are wrong, slow, or have no gradient.
"""

from torch2ort.symbolics.translations import activation, attention, basics, loss, normalization
from torch2ort.symbolics.translations.registry import KERNELS_FOR_GRADIENTS, translation_table

__all__ = ["KERNELS_FOR_GRADIENTS", "translation_table"]
del activation, attention, basics, loss, normalization
