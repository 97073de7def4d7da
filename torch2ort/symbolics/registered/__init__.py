"""What users register, at work: Functions, torch's operators and ONNX's gradients as graphs."""

from torch2ort.symbolics.registered.builder import GraphBuilder
from torch2ort.symbolics.registered.calls import map_site
from torch2ort.symbolics.registered.values import GraphValue

__all__ = ["GraphBuilder", "GraphValue", "map_site"]
