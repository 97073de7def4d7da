"""Translation of an ExportedProgram into an ONNX graph that is correct on its Target."""

from torch2ort.symbolics.onnx_translation import Translated, translate
from torch2ort.symbolics.preparation import check, prepare

__all__ = [
    "Translated",
    "check",
    "prepare",
    "translate",
]
