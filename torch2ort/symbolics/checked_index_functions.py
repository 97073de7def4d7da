"""The ONNX functions that check indices in a graph that any runtime may run."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from torch2ort.kernels.index_check import BOUNDLESS, CHECKED_INDEX, Check, decode_check

_DOMAIN, _, _NAME = CHECKED_INDEX.partition("::")
# An index that far below zero is outside of every tensor, and its sum with a small one too.
_FAR = {ir.DataType.INT64: 1 << 62, ir.DataType.INT32: 1 << 30}


def define_checks(model: ir.Model, opset: int) -> None:
    """Give ``model`` a local function for each check in it, so that any runtime can run it.

    The function moves negative indices so far away that the operator which reads them refuses them, or
    looks each up in a table of the allowed ones. Its documentation is the check's text.
    """
    known: dict[tuple[str, int, ir.DataType], str] = {}
    for node in model.graph:
        if node.domain != _DOMAIN or node.op_type != _NAME:
            continue
        text = node.attributes.pop("check").as_string()
        index = node.inputs[0]
        assert index is not None
        assert index.dtype is not None
        key = (text, len(node.inputs), index.dtype)
        if key not in known:
            known[key] = f"{_NAME}_{len(known)}"
            function = _function(known[key], decode_check(text), len(node.inputs), index.dtype, opset)
            function.doc_string = text
            model.functions[function.identifier()] = function
            model.opset_imports[_DOMAIN] = 1
        node.op_type = known[key]


def _function(name: str, check: Check, inputs: int, dtype: ir.DataType, opset: int) -> ir.Function:
    values = [ir.Value(name=f"x{i}") for i in range(inputs)]
    body = _Body(dtype)
    result = body.op("Identity", _checked(body, check, values))
    graph = ir.Graph(values, [result], nodes=body.nodes, opset_imports={"": opset}, name=name)
    return ir.Function(_DOMAIN, name, graph=graph, attributes=[])


def _checked(body: _Body, check: Check, values: Sequence[ir.Value]) -> ir.Value:
    index, tensors = values[0], values[1:]
    if check.low is None:
        # ONNX's Gather counts from the end, too, and looks how far.
        return _looked_up(body, check, tensors, index) if check.exact else index
    distance = index if check.low == 0 else body.op("Sub", index, body.number(check.low))
    wrong = body.op("Less", distance, body.number(0))
    if check.ignored is not None:
        allowed = body.op("Equal", index, body.number(check.ignored))
        wrong = body.op("And", wrong, body.op("Not", allowed))
    if check.size == BOUNDLESS and check.exact:
        # There is no table of so many, but one of a single zero.
        place = body.op("Where", wrong, body.number(-_FAR[body.dtype]), body.number(0))
        table = body.op("Range", body.number(0), body.number(1), body.number(1))
        return body.op("Add", index, body.op("Gather", table, place))
    far = body.op("Sub", distance, body.number(_FAR[body.dtype]))
    moved = body.op("Where", wrong, far, distance)
    return _looked_up(body, check, tensors, moved) if check.exact else moved


def _looked_up(body: _Body, check: Check, tensors: Sequence[ir.Value], index: ir.Value) -> ir.Value:
    """The number at a place among those that are allowed."""
    if check.source is None:
        size = body.number(check.size or 0)
    elif check.dim is None:
        size = body.op("Cast", body.op("Size", tensors[check.source]), to=int(body.dtype))
    else:
        shape = body.op("Shape", tensors[check.source])
        size = body.op("Cast", body.op("Gather", shape, body.number(check.dim)), to=int(body.dtype))
    table = body.op("Range", body.number(check.low or 0), size, body.number(1))
    return body.op("Gather", table, index)


class _Body:
    """The nodes of a function."""

    def __init__(self, dtype: ir.DataType) -> None:
        self.nodes: list[ir.Node] = []
        self.dtype = dtype

    def op(self, name: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        made = [ir.AttrInt64(key, value) for key, value in attributes.items()]
        node = ir.Node("", name, list(inputs), made, num_outputs=1, name=f"node_{len(self.nodes)}")
        node.outputs[0].name = f"v{len(self.nodes)}"
        self.nodes.append(node)
        return node.outputs[0]

    def number(self, value: int) -> ir.Value:
        made = self.op("Constant")
        (node,) = self.nodes[-1:]
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(value, dtype=self.dtype))
        return made
