"""Rewrites of matrix products to forms that onnxruntime's fusions handle correctly.

Two fusions are wrong in each onnxruntime that was tested (1.19 to 1.32). One fuses a Transpose into the
MatMul behind it, which with a vector on the right multiplies the wrong numbers. The other fuses constant
factors into the MatMul. Of two factors in a row it drops the first, even if other nodes read it, so a run
lacks that value.
"""

from __future__ import annotations

import onnx_ir as ir


def avoid_wrong_matmul_fusions(model: ir.Model) -> None:
    """Rewrite in place the products that onnxruntime would fuse incorrectly."""
    for node in list(model.graph.all_nodes()):
        if node.domain:
            continue
        if node.op_type == "MatMul":
            _widen_vector(node)
        elif node.op_type in ("Mul", "Div"):
            _part_factors(node)


def _widen_vector(node: ir.Node) -> None:
    """Make a vector on the right a matrix."""
    left, vector = node.inputs
    if vector is None or vector.shape is None or len(vector.shape) != 1:
        return
    if left is not None and left.shape is not None and len(left.shape) < 2:
        return
    product = node.outputs[0]
    axis = ir.node("Constant", [], {"value": ir.tensor([-1], dtype=ir.DataType.INT64)})
    column = ir.node("Unsqueeze", [vector, axis.outputs[0]])
    node.replace_input_with(1, column.outputs[0])
    back = ir.node("Squeeze", [product, axis.outputs[0]])
    for made in (axis, column, back):
        made.metadata_props.update(node.metadata_props)
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


def _part_factors(node: ir.Node) -> None:
    """Keep two constant factors in a row separate, where a product reads the result of the first one.

    One factor in place of two would change the result where the type cannot represent their product. So a
    view that changes nothing hides the first factor from the fusion.
    """
    scaled = _scaled(node)
    before = None if scaled is None else scaled.producer()
    if scaled is None or before is None or before.domain or _scaled(before) is None:
        return
    if not any(user is not node and user.op_type in ("MatMul", "Transpose") for user in scaled.consumers()):
        return
    axis = ir.node("Constant", [], {"value": ir.tensor([0], dtype=ir.DataType.INT64)})
    row = ir.node("Unsqueeze", [scaled, axis.outputs[0]])
    back = ir.node("Squeeze", [row.outputs[0], axis.outputs[0]])
    for made in (axis, row, back):
        made.metadata_props.update(node.metadata_props)
    for value in (row.outputs[0], back.outputs[0]):
        if scaled.dtype is not None:
            value.dtype = scaled.dtype
    back.outputs[0].shape = scaled.shape
    assert node.graph is not None
    node.graph.insert_before(node, [axis, row, back])
    node.replace_input_with(list(node.inputs).index(scaled), back.outputs[0])


def _scaled(node: ir.Node) -> ir.Value | None:
    """Return the input that a node scales by a constant number; ``None`` if the node is no scaling."""
    if node.op_type not in ("Mul", "Div") or len(node.inputs) != 2:
        return None
    for position in (1,) if node.op_type == "Div" else (1, 0):
        constant, other = node.inputs[position], node.inputs[1 - position]
        tensor = None if constant is None else ir.convenience.get_const_tensor(constant)
        if tensor is not None and tensor.size == 1 and len(tensor.shape) == 0:
            return other
    return None
