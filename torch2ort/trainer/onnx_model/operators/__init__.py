"""Operators of ONNX as functions of PyTorch's tensors, one file per topic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch2ort.trainer.onnx_model.operators.elementwise import ELEMENTWISE
from torch2ort.trainer.onnx_model.operators.layers import LAYERS
from torch2ort.trainer.onnx_model.operators.reductions_and_matmul import REDUCTIONS
from torch2ort.trainer.onnx_model.operators.shapes import SHAPES

# By the operator's name, with the domain as prefix if it is not ONNX's own.
OPERATORS: dict[str, Callable[..., Any]] = {**ELEMENTWISE, **SHAPES, **REDUCTIONS, **LAYERS}
