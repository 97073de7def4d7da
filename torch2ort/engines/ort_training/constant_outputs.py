"""Outputs that depend on no input, which onnxruntime-training's gradient builder does not find."""

from __future__ import annotations

import onnx_ir as ir

from torch2ort.errors import UnsupportedOperatorError
from torch2ort.symbolics.stop_gradient import define_stop_gradient, stop_node


def tie_constant_outputs(model: ir.Model) -> None:
    """Make each output of ``model`` depend on an input.

    ONNX Runtime computes what depends on none before the gradient graph is built, and the builder looks for
    the node that gives an output. Nothing of an input is joined to such a value, which stays as it is.

    Args:
        model: its weights are inputs.

    Raises:
        UnsupportedOperatorError: such an output is of double precision.
    """
    graph = model.graph
    carried = set(graph.inputs)
    for node in graph:
        if any(value in carried for value in node.inputs):
            carried.update(node.outputs)
    if not graph.inputs or all(value in carried for value in graph.outputs):
        return
    stop = stop_node(graph.inputs[0])
    flat = ir.node("Reshape", [stop.outputs[0], _constant(graph, [-1])])
    nothing = ir.node("Slice", [flat.outputs[0], _constant(graph, [0]), _constant(graph, [0])])
    graph.extend([stop, flat, nothing])
    for i, value in enumerate(graph.outputs):
        if value not in carried:
            graph.outputs[i] = _tied(graph, value, nothing.outputs[0])
    define_stop_gradient(model, model.opset_imports[""])


def _tied(graph: ir.Graph, value: ir.Value, nothing: ir.Value) -> ir.Value:
    assert value.dtype is not None
    if value.dtype == ir.DataType.DOUBLE:
        # Seen to fail in the run.
        raise UnsupportedOperatorError(
            "the model returns a constant in double precision, which onnxruntime-training cannot give beside "
            "what is trained. Return it in float32"
        )
    cast = ir.node("Cast", [nothing], {"to": value.dtype})
    flat = ir.node("Reshape", [value, _constant(graph, [-1])])
    joined = ir.node("Concat", [flat.outputs[0], cast.outputs[0]], {"axis": 0})
    shape = ir.node("Shape", [value])
    same = ir.node("Reshape", [joined.outputs[0], shape.outputs[0]], {"allowzero": 1})
    graph.extend([cast, flat, joined, shape, same])
    result = same.outputs[0]
    result.name, result.type, result.shape = f"{value.name}.tied", value.type, value.shape
    return result


def _constant(graph: ir.Graph, value: list[int]) -> ir.Value:
    constant = ir.node("Constant", [], {"value": ir.tensor(value, dtype=ir.DataType.INT64)})
    graph.append(constant)
    return constant.outputs[0]
