"""Random calls of users' Functions in the order of the program."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir


def keep_random_order(graph: ir.Graph, random: Collection[str]) -> None:
    """Keep ONNX Runtime from reordering the nodes that draw random numbers.

    Numbers come from PyTorch's one generator, so another order is other numbers than eager's. ONNX has no
    order but that of data: each such node's first input is reshaped to its own shape, to which the node
    before contributes nothing.

    Args:
        graph: nodes in the order of the program; changed in place.
        random: names of the nodes that draw.
    """
    before: ir.Node | None = None
    for node in list(graph):
        if node.name not in random:
            continue
        if before is not None and before.outputs[1] not in node.inputs and node.inputs:
            _depend(graph, node, before.outputs[1])
        before = node if len(node.outputs) > 1 else before


def _depend(graph: ir.Graph, node: ir.Node, token: ir.Value) -> None:
    first = node.inputs[0]
    assert first is not None
    flat = ir.node("Reshape", [token, _constant(graph, node, [-1])])
    nothing = ir.node("Slice", [flat.outputs[0], _constant(graph, node, [0]), _constant(graph, node, [0])])
    sizes = ir.node("Cast", [nothing.outputs[0]], {"to": ir.DataType.INT64})
    own = ir.node("Shape", [first])
    shape = ir.node("Concat", [own.outputs[0], sizes.outputs[0]], {"axis": 0})
    same = ir.node("Reshape", [first, shape.outputs[0]], {"allowzero": 1})
    same.outputs[0].shape, same.outputs[0].type = first.shape, first.type
    graph.insert_before(node, [flat, nothing, sizes, own, shape, same])
    node.replace_input_with(0, same.outputs[0])


def _constant(graph: ir.Graph, node: ir.Node, value: list[int]) -> ir.Value:
    constant = ir.node("Constant", [], {"value": ir.tensor(value, dtype=ir.DataType.INT64)})
    graph.insert_before(node, constant)
    return constant.outputs[0]
