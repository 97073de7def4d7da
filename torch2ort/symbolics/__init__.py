"""From an ExportedProgram to an ONNX graph that is right on what it is for, its Target."""

from torch2ort.symbolics._prepare import prepare
from torch2ort.symbolics._translate import Translated, translate

__all__ = [
    "Translated",
    "prepare",
    "translate",
]
