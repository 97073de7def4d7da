"""Operators of ONNX as functions of PyTorch's tensors, one file a theme."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch2ort.trainer.onnx_model.operators.elementwise import ELEMENTWISE
from torch2ort.trainer.onnx_model.operators.layers import LAYERS
from torch2ort.trainer.onnx_model.operators.reductions_and_matmul import REDUCTIONS
from torch2ort.trainer.onnx_model.operators.shapes import SHAPES

# By the operator's name; one that is not of ONNX's own domain with that in front.
OPERATORS: dict[str, Callable[..., Any]] = {**ELEMENTWISE, **SHAPES, **REDUCTIONS, **LAYERS}
