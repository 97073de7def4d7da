"""Matrix products in forms that onnxruntime's fusions do right.

Two fusions were found wrong on each onnxruntime that was tried (1.19 to 1.32). One takes a Transpose into the
MatMul behind it, which with a vector on the right multiplies other numbers. The other takes constant factors
into the MatMul, and of two in a row drops the first, though others read it, so that a run has no such value.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


def mend_products(model: ir.Model) -> None:
    """Rewrite in place the products that would be fused into wrong ones."""
    for node in list(model.graph.all_nodes()):
        if node.domain:
            continue
        if node.op_type == "MatMul":
            _widen_vector(node)
        elif node.op_type in ("Mul", "Div"):
            _join_factors(node)


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


def _join_factors(node: ir.Node) -> None:
    """Of two constant factors in a row make one, where a product reads what has the first alone."""
    factor, scaled = _factor(node)
    before = None if scaled is None else scaled.producer()
    if factor is None or scaled is None or before is None or before.domain:
        return
    first, source = _factor(before)
    if first is None or source is None or first.dtype != factor.dtype:
        return
    if not any(user is not node and user.op_type in ("MatMul", "Transpose") for user in scaled.consumers()):
        return
    value = ir.tensor(first * factor, dtype=ir.DataType.from_numpy(first.dtype))
    constant = ir.node("Constant", [], {"value": value})
    constant.metadata_props.update(node.metadata_props)
    result = constant.outputs[0]
    result.dtype, result.shape, result.const_value = value.dtype, ir.Shape(first.shape), value
    assert node.graph is not None
    node.graph.insert_before(node, constant)
    joined = ir.node("Mul", [source, result])
    joined.metadata_props.update(node.metadata_props)
    node.graph.insert_before(node, joined)
    product, made = node.outputs[0], joined.outputs[0]
    made.name, made.shape = product.name, product.shape
    if product.dtype is not None:
        made.dtype = product.dtype
    made.metadata_props.update(product.metadata_props)
    ir.convenience.replace_all_uses_with(product, made, replace_graph_outputs=True)
    node.graph.remove(node, safe=True)


def _factor(node: ir.Node) -> tuple[np.ndarray | None, ir.Value | None]:
    """The constant number by which a node multiplies, and what; ``None`` if it does not."""
    if node.op_type not in ("Mul", "Div") or len(node.inputs) != 2:
        return None, None
    for position in (1,) if node.op_type == "Div" else (1, 0):
        constant, other = node.inputs[position], node.inputs[1 - position]
        tensor = None if constant is None else ir.convenience.get_const_tensor(constant)
        if tensor is None or tensor.size != 1 or len(tensor.shape) > 0:
            continue
        number = tensor.numpy()
        if number.dtype in (np.float32, np.float64) and number != 0:
            return (1 / number if node.op_type == "Div" else number), other
    return None, None
