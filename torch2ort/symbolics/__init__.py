"""From an ExportedProgram to an ONNX graph that runs, and that onnxruntime-training trains right."""

from torch2ort.symbolics._prepare import prepare
from torch2ort.symbolics._translate import Translated, translate
from torch2ort.symbolics.stop_gradient import lower_stop_gradients

__all__ = [
    "Translated",
    "lower_stop_gradients",
    "prepare",
    "translate",
]
