"""Conversion of the axes of reductions, to count from the front.

With an axis that is counted from the end, ONNX Runtime reduces a tensor without elements to the shape of the
tensor itself.
"""

from __future__ import annotations

import onnx_ir as ir


def count_axes_from_the_front(model: ir.Model) -> None:
    """Rewrite in place the constant axes of every reduction of a tensor of known rank."""
    for node in list(model.graph.all_nodes()):
        if node.domain or not node.op_type.startswith(("Reduce", "ArgM")):
            continue
        source = node.inputs[0]
        if source is None or source.shape is None:
            continue
        rank = len(source.shape)
        for name in ("axis", "axes"):
            given = node.attributes.get(name)
            if given is not None and given.type == ir.AttributeType.INT:
                node.attributes[name] = ir.AttrInt64(name, _from_the_front(given.as_int(), rank))
            elif given is not None:
                axes = [_from_the_front(axis, rank) for axis in given.as_ints()]
                node.attributes[name] = ir.AttrInt64s(name, axes)
        if len(node.inputs) > 1 and (axes_input := node.inputs[1]) is not None:
            _rewrite_input(node, axes_input, rank)


def _rewrite_input(node: ir.Node, given: ir.Value, rank: int) -> None:
    """Replace the axes input of ``node`` by a constant of its own."""
    tensor = ir.convenience.get_const_tensor(given)
    if tensor is None or (tensor.numpy() >= 0).all():
        return
    axes = ir.tensor([_from_the_front(int(axis), rank) for axis in tensor.numpy()], dtype=ir.DataType.INT64)
    constant = ir.node("Constant", [], {"value": axes})
    result = constant.outputs[0]
    result.dtype, result.shape, result.const_value = ir.DataType.INT64, ir.Shape([len(tensor.numpy())]), axes
    assert node.graph is not None
    node.graph.insert_before(node, constant)
    node.replace_input_with(1, result)


def _from_the_front(axis: int, rank: int) -> int:
    return axis + rank if axis < 0 else axis
