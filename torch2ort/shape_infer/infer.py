"""Shape inference over the whole graph by onnx-shape-inference, with a rule for PythonOp.

Capture has put torch.export's sizes on the values that the program names; this fills in the values
that translation added in between, and names every size that is left.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_shape_inference import (
    OpUsageError,
    ShapeInferenceContext,
    ShapeInferenceError,
    infer_symbolic_shapes,
    registry,
)

from torch2ort.errors import ExportError

_RANKS = "output_tensor_ranks"
_TYPES = "output_tensor_types"


def infer(model: ir.Model) -> None:
    """Set the shapes of every value of ``model``, in place.

    Raises:
        ExportError: two operators of the graph contradict each other about a shape.
    """
    try:
        infer_symbolic_shapes(model, policy="refine", warn_on_missing=False)
    except (OpUsageError, ShapeInferenceError) as error:
        raise ExportError(f"the exported graph's shapes contradict each other: {error}") from error


@registry.register("com.microsoft", "PythonOp", since_version=1)
@registry.register("org.pytorch.aten", "ATen", since_version=1)
def _infer_python_op(context: ShapeInferenceContext, node: ir.Node) -> None:
    """The site's dtypes and ranks, and the sizes that capture found."""
    if _RANKS not in node.attributes:
        return
    # onnxruntime-training infers a scalar for the context although its kernel gives int64[1]: no shape, then.
    own, *tensors = node.outputs
    context.set_dtype(own, ir.DataType.INT64)
    ranks, types = node.attributes[_RANKS].as_ints(), node.attributes[_TYPES].as_ints()
    for value, rank, dtype in zip(tensors, ranks, types, strict=True):
        context.set_dtype(value, ir.DataType(dtype))
        if value.shape is None:
            context.set_shape(value, ir.Shape([context.new_symbolic_dim() for _ in range(rank)]))
