"""Rewrites of nodes whose gradient onnxruntime-training would build wrong, where ONNX has another way.

They need to know which values carry a gradient, so they come last.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from torch2ort.symbolics.gradient_nodes import gradient_nodes
from torch2ort.symbolics.stop_gradient import stop_node


def mend(model: ir.Model, trained: frozenset[str]) -> None:
    """Rewrite in place what stands on the way of a gradient.

    Args:
        model: the graph.
        trained: names of the initializers and inputs that require a gradient.
    """
    nodes = gradient_nodes(model, trained)
    differentiated = {v for node, _ in nodes for v in node.outputs}
    carrying = {node.inputs[i] for node, inputs in nodes for i in inputs}
    for node, inputs in nodes:
        _tell_apart(model.graph, node, inputs)
        if node.op_type == "Where":
            _expand_branches(model.graph, node, inputs)
        elif node.op_type == "Split":
            _split_by_slices(model.graph, node, differentiated)
        if node.op_type in _NOT_OF_SCALARS and _is_scalar(node.outputs[0]):
            _with_one_axis(model.graph, node)
    for node in list(model.graph):
        if node.op_type in _PARTS and node.inputs[0] in carrying and node.outputs[0] not in differentiated:
            _stop_before(model.graph, node)


# Their gradients are made with constants of shape [1], and so of a scalar have one axis too many;
# FastGelu's kernel takes no scalar at all.
_NOT_OF_SCALARS = frozenset({"Cos", "Erf", "FastGelu", "Pow", "ReduceL2", "Sqrt", "Where"})

# ONNX Runtime fuses those that take one value apart into a Split, whose gradient needs that of every part.
_PARTS = frozenset({"Slice", "Gather"})


def _tell_apart(graph: ir.Graph, node: ir.Node, inputs: frozenset[int]) -> None:
    """Give a node that takes one graph input twice two names for it; its gradients would get one."""
    seen: set[ir.Value] = set()
    for position in sorted(inputs):
        value = node.inputs[position]
        assert value is not None
        if value in seen and value.producer() is None:
            shape = _insert(graph, node, "Shape", [value], ir.DataType.INT64, None)
            node.replace_input_with(
                position, _insert(graph, node, "Reshape", [value, shape], value.dtype, value.shape)
            )
        seen.add(value)


def _is_scalar(value: ir.Value) -> bool:
    return value.shape is not None and len(value.shape) == 0


def _with_one_axis(graph: ir.Graph, node: ir.Node) -> None:
    """Compute a scalar as a vector of one element."""
    one = _constant(graph, node, 1)
    for i, value in enumerate(node.inputs):
        if value is not None and _is_scalar(value):
            vector = _insert(graph, node, "Reshape", [value, one], value.dtype, ir.Shape([1]))
            node.replace_input_with(i, vector)
    result = node.outputs[0]
    node.outputs[0].shape = ir.Shape([1])
    nothing = _vector(graph, node, [])
    back = ir.Node("", "Reshape", [result, nothing], num_outputs=1)
    back.metadata_props.update(node.metadata_props)
    scalar = back.outputs[0]
    scalar.name, scalar.type, scalar.shape = f"{result.name}.scalar", result.type, ir.Shape([])
    ir.convenience.replace_all_uses_with(result, scalar, replace_graph_outputs=True)
    back.replace_input_with(0, result)
    graph.insert_after(node, back)


def _stop_before(graph: ir.Graph, node: ir.Node) -> None:
    """Take a part that no gradient comes back from out of a value that has no gradient either."""
    source = node.inputs[0]
    assert source is not None
    stop = stop_node(source)
    stop.metadata_props.update(node.metadata_props)
    graph.insert_before(node, stop)
    node.replace_input_with(0, stop.outputs[0])


def _expand_branches(graph: ir.Graph, node: ir.Node, inputs: frozenset[int]) -> None:
    """Where gives a broadcast branch the gradient of its own output, unreduced."""
    for position in sorted(inputs):
        branch = node.inputs[position]
        assert branch is not None
        if branch.shape is not None and branch.shape == node.outputs[0].shape:
            continue
        for other in (node.inputs[0], node.inputs[3 - position]):
            shape = _insert(graph, node, "Shape", [other], ir.DataType.INT64, None)
            branch = _insert(graph, node, "Expand", [branch, shape], branch.dtype, None)
        branch.shape = node.outputs[0].shape
        node.replace_input_with(position, branch)


def _split_by_slices(graph: ir.Graph, node: ir.Node, differentiated: set[ir.Value]) -> None:
    """Split joins the gradients that there are, so that one missing makes the whole too short."""
    used = [v for v in node.outputs if v.uses() or v.is_graph_output()]
    if len(used) == len(node.outputs) and all(_reached(v, differentiated) for v in node.outputs):
        return
    source = node.inputs[0]
    axis = node.attributes.get_int("axis", 0)
    sizes = _split_sizes(graph, node, axis)
    if sizes is None:
        # The halves of a gated unit, of which a gradient reaches both or none.
        return
    start = _constant(graph, node, 0)
    for value, size in zip(list(node.outputs), sizes, strict=True):
        end = _insert(graph, node, "Add", [start, size], ir.DataType.INT64, ir.Shape([1]))
        if value in used:
            bounds = [start, end, _constant(graph, node, axis)]
            part = _insert(graph, node, "Slice", [source, *bounds], value.dtype, value.shape)
            part.name = f"{value.name}.slice"
            if _reached(value, differentiated):
                differentiated.add(part)
            ir.convenience.replace_all_uses_with(value, part, replace_graph_outputs=True)
        start = end
    graph.remove(node, safe=True)


def _reached(value: ir.Value, differentiated: set[ir.Value]) -> bool:
    """Whether a gradient comes back through ``value``."""
    if value.is_graph_output():
        return True
    return any(v in differentiated for use in value.uses() for v in use.node.outputs)


def _split_sizes(graph: ir.Graph, node: ir.Node, axis: int) -> list[ir.Value] | None:
    """The size of each part, as a vector of one number; ``None`` if equal parts have a size that varies."""
    given = node.inputs[1] if len(node.inputs) > 1 else None
    if given is not None:
        places = [_constant(graph, node, i) for i in range(len(node.outputs))]
        return [
            _insert(graph, node, "Gather", [given, place], ir.DataType.INT64, ir.Shape([1]))
            for place in places
        ]
    sizes = [v.shape[axis] for v in node.outputs if v.shape is not None]
    known = [_constant(graph, node, s) for s in sizes if isinstance(s, int)]
    return known if len(known) == len(node.outputs) else None


def _insert(
    graph: ir.Graph,
    before: ir.Node,
    op_type: str,
    inputs: list[ir.Value | None],
    dtype: ir.DataType | None,
    shape: ir.Shape | None,
) -> ir.Value:
    node = ir.Node("", op_type, inputs, num_outputs=1)
    node.metadata_props.update(before.metadata_props)
    node.outputs[0].shape = shape
    if dtype is not None:
        node.outputs[0].dtype = dtype
    graph.insert_before(before, node)
    return node.outputs[0]


def _constant(graph: ir.Graph, before: ir.Node, number: int) -> ir.Value:
    return _vector(graph, before, [number])


def _vector(graph: ir.Graph, before: ir.Node, numbers: list[int]) -> ir.Value:
    tensor = ir.tensor(np.array(numbers, np.int64))
    node = ir.Node("", "Constant", [], [ir.AttrTensor("value", tensor)], num_outputs=1)
    node.outputs[0].dtype, node.outputs[0].shape = ir.DataType.INT64, ir.Shape([len(numbers)])
    node.outputs[0].const_value = tensor
    graph.insert_before(before, node)
    return node.outputs[0]
