"""Shape inference over the whole graph by onnx-shape-inference, with a rule for PythonOp.

Capture sets torch.export's sizes on the values that the program names. This module fills in the values
that translation added in between, and names all remaining sizes.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
import sympy
from onnx_shape_inference import (
    OpUsageError,
    ShapeInferenceError,
    infer_symbolic_shapes,
    registry,
)

from torch2ort.errors import ExportError, Torch2OrtError
from torch2ort.shape_infer.dim_names import name_sizes
from torch2ort.shape_infer.python_op import infer_python_op
from torch2ort.shape_infer.split import infer_split


def infer(model: ir.Model, names: Mapping[str, sympy.Expr] | None = None) -> None:
    """Set the shapes of every value of ``model``, in place.

    Args:
        model: an exported graph.
        names: symbol of torch -> its name in the graph, see :mod:`torch2ort.sizes.symbols`.

    Raises:
        ExportError: two operators of the graph contradict each other about a shape.
        ShapeInferenceError: a Function's shape inferer contradicts its site.
    """
    name_sizes(model, names or {})
    try:
        infer_symbolic_shapes(model, policy="refine", warn_on_missing=False)
    except (OpUsageError, ShapeInferenceError) as error:
        if isinstance(error.__cause__, Torch2OrtError):
            raise error.__cause__ from None
        raise ExportError(f"the exported graph's shapes contradict each other: {error}") from error
    name_sizes(model, {})


for _domain, _operator in (("com.microsoft", "PythonOp"), ("org.pytorch.aten", "ATen")):
    registry.register(_domain, _operator, since_version=1)(infer_python_op)
for _version in registry.version_boundaries("", "Split"):
    registry.register("", "Split", since_version=_version)(infer_split)
