"""The shape rule of Split for sizes that are computed in a run.

onnx-shape-inference assumes that they are equal.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext, registry

registry.collect()
_SINCE = registry.version_boundaries("", "Split")[0]
_known_sizes = registry.get("", "Split", _SINCE)


def infer_split(context: ShapeInferenceContext, node: ir.Node) -> None:
    """Set the shapes of the parts; their sizes along the axis stay as known, unless they are a constant."""
    sizes = node.inputs[1] if len(node.inputs) > 1 else None
    data = node.inputs[0]
    assert _known_sizes is not None
    if sizes is None or ir.convenience.get_const_tensor(sizes) is not None:
        _known_sizes(context, node)
        return
    if data is None or data.shape is None:
        return
    axis = node.attributes.get_int("axis", 0) % len(data.shape)
    for part in node.outputs:
        if part.shape is None:
            dims = list(data.shape)
            dims[axis] = context.new_symbolic_dim()
            context.set_shape_and_dtype(part, ir.Shape(dims), data.dtype)
