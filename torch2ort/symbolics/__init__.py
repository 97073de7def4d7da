"""From an ExportedProgram to an ONNX graph that is right on what it is for, its Target."""

from torch2ort.symbolics.onnx_translation import Translated, translate
from torch2ort.symbolics.preparation import check, prepare

__all__ = [
    "Translated",
    "check",
    "prepare",
    "translate",
]
