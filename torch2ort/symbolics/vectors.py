"""Products of a matrix and a vector, as products of two matrices.

onnxruntime fuses a Transpose into the MatMul behind it (1.19 to 1.32 were tried), and the fused node is
wrong where a vector stands on the right: with ``a.T @ v`` it gives numbers of another product.
"""

from __future__ import annotations

import onnx_ir as ir


def widen_vectors(model: ir.Model) -> None:
    """Rewrite in place every MatMul with a vector on the right."""
    for node in list(model.graph.all_nodes()):
        if node.domain or node.op_type != "MatMul":
            continue
        left, right = node.inputs
        if right is None or right.shape is None or len(right.shape) != 1:
            continue
        if left is None or left.shape is None or len(left.shape) > 1:
            _widen(node, right)


def _widen(node: ir.Node, vector: ir.Value) -> None:
    product = node.outputs[0]
    axis = ir.node("Constant", [], {"value": ir.tensor([-1], dtype=ir.DataType.INT64)})
    column = ir.node("Unsqueeze", [vector, axis.outputs[0]])
    node.replace_input_with(1, column.outputs[0])
    back = ir.node("Squeeze", [product, axis.outputs[0]])
    for made in (axis, column, back):
        made.metadata_props.update(node.metadata_props)
    axis.outputs[0].dtype = ir.DataType.INT64
    result = back.outputs[0]
    for value, like in ((column.outputs[0], vector), (result, product)):
        if like.dtype is not None:
            value.dtype = like.dtype
    result.shape, product.shape = product.shape, None
    result.name, product.name = product.name, f"{product.name}.column"
    result.metadata_props.update(product.metadata_props)
    assert node.graph is not None
    ir.convenience.replace_all_uses_with(product, result, replace_graph_outputs=True)
    back.replace_input_with(0, product)
    node.graph.insert_before(node, [axis, column])
    node.graph.insert_after(node, back)
