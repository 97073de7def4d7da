"""Element types without a kernel in ONNX Runtime: nodes compute in a wider type, or become PyTorch's kernels.

ONNX's operators accept more types than ONNX Runtime has kernels for. A wider type leads to the same result
where eager's result is the exact one cut off to the narrow type: sums and products of integers wrap alike,
comparisons and moves change nothing, and PyTorch, too, computes bfloat16 in float32 and rounds.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from torch2ort.support.provenance import fx_name
from torch2ort.symbolics.double_literals import is_rounded
from torch2ort.symbolics.element_types import Typed, operator_name, typed_nodes
from torch2ort.symbolics.kernel_types import kernel_types

_FLOAT, _DOUBLE, _INT32, _INT64 = ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT32, ir.DataType.INT64
# The scatter kernels move elements of these types, but do not add them up.
_NOT_ADDED_UP = frozenset({ir.DataType.BOOL, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_WIDER: dict[ir.DataType, tuple[ir.DataType, ...]] = {
    **dict.fromkeys((ir.DataType.BFLOAT16, ir.DataType.FLOAT16), (_FLOAT,)),
    **dict.fromkeys(
        (ir.DataType.BOOL, ir.DataType.UINT8, ir.DataType.INT8, ir.DataType.INT16, ir.DataType.UINT16),
        (_INT32, _INT64),
    ),
    **dict.fromkeys((ir.DataType.INT32, ir.DataType.UINT32), (_INT64,)),
}
# For integers, the result of these in a wider type, cut off, equals the result in the narrow one.
_EXACT = frozenset(
    {
        "Abs", "Add", "ArgMax", "ArgMin", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Clip",
        "Compress", "Concat", "ConstantOfShape", "CumSum", "DepthToSpace", "Equal", "Expand", "EyeLike",
        "Gather", "GatherElements", "GatherND", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "MatMul",
        "Max", "Min", "Mul", "Neg", "NonZero", "Pad", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum",
        "Relu", "ScatterElements", "ScatterND", "Sign", "Size", "Slice", "SpaceToDepth", "Split", "Sub",
        "Tile", "TopK", "Transpose", "Trilu", "Where",
    }
)  # fmt: skip

_SCALINGS = frozenset({"Div", "Mul"})


def fit_types(model: ir.Model) -> set[str]:
    """Rewrite in place the nodes whose types ONNX Runtime has no kernel for.

    Args:
        model: the graph.

    Returns:
        Name of the FX node behind each node that has no kernel in a wider type either, has an output of
        another type than in the program, or fewer digits.
    """
    wrong: set[str] = set()
    casts = _Casts()
    nodes = list(typed_nodes(model))
    wrong |= _rounded(typed.node for typed in nodes)
    for typed in nodes:
        wider = {variable: _wider(typed, variable) for variable in _missing(typed)}
        if typed.mistyped or typed.mixed or _would_be_fused(typed.node) or None in wider.values():
            wrong.add(fx_name(typed.node))
            continue
        for variable, kind in wider.items():
            assert kind is not None
            casts.widen(typed, variable, kind)
        if typed.node.op_type == "ReduceSum":
            _sum_exactly(typed.node)
    casts.forget_unread()
    return wrong


def _rounded(nodes: Iterable[ir.Node]) -> set[str]:
    """Return the operators that lose digits of a double: torch.onnx makes many constants of float."""
    return {
        fx_name(node)
        for node in nodes
        for value in node.inputs
        if value is not None and (_is_of_float(node, value) or _is_widened_too_late(node, value))
    }


def _is_widened_too_late(node: ir.Node, value: ir.Value) -> bool:
    """Return True if ``node`` converts ``value`` to double, which an operator of double computed in float."""
    producer = value.producer()
    if node.op_type != "Cast" or producer is None or fx_name(producer) != fx_name(node):
        return False
    return value.dtype == _FLOAT and node.outputs[0].dtype == _DOUBLE


def _is_of_float(node: ir.Node, value: ir.Value) -> bool:
    """Return True if an operator of double reads a constant that was rounded to float."""
    if value.dtype == _DOUBLE:
        cast = value.producer()
        # A Cast that folding made of a CastLike belongs to the operator that reads it.
        by_the_way = cast is not None and cast.op_type == "Cast" and fx_name(cast) == cast.name
        return is_rounded(cast.inputs[0] if by_the_way else value)  # type: ignore[union-attr,arg-type]
    return node.op_type != "Cast" and node.outputs[0].dtype == _DOUBLE and is_rounded(value)


def _would_be_fused(node: ir.Node) -> bool:
    """Return True if onnxruntime fuses the node into one that does not compute in double.

    onnxruntime 1.19.2 fuses a product with a transposition, and a sigmoid with the product by its input,
    without a kernel for the fused node. Every version fuses a product with a factor, which it stores in
    float.
    """
    if node.outputs[0].dtype != _DOUBLE or node.op_type not in ("MatMul", "Sigmoid"):
        return False
    if node.op_type == "Sigmoid":
        return True
    producers = (v.producer() for v in node.inputs if v is not None)
    before = {p.op_type for p in producers if p is not None}
    after = {user.op_type for user in node.outputs[0].consumers()}
    return not before.isdisjoint({"Transpose", "Cast", *_SCALINGS}) or not after.isdisjoint(_SCALINGS)


def _missing(typed: Typed) -> list[str]:
    """Return the variables whose type no kernel supports."""
    known = kernel_types(operator_name(typed.node))
    if known is None:
        return []
    return [
        variable
        for variable, kind in typed.types.items()
        if variable in known
        and kind != ir.DataType.STRING
        and (kind not in known[variable] or _is_wrong(typed.node, kind))
    ]


def _is_wrong(node: ir.Node, kind: ir.DataType) -> bool:
    """Return True if there is a kernel whose results are wrong."""
    if node.op_type == "Clip":
        # Without one of its bounds the kernel uses zero.
        return kind == ir.DataType.FLOAT16
    if node.op_type == "ReduceSum":
        # Onnxruntime 1.31 adds integers up in double, and saturates on overflow.
        return kind == ir.DataType.INT32
    added_up = (
        node.op_type.startswith("Scatter") and node.attributes.get_string("reduction", "none") != "none"
    )
    return added_up and kind in _NOT_ADDED_UP


def _wider(typed: Typed, variable: str) -> ir.DataType | None:
    """Return a type for ``variable`` in which the result is the same."""
    kind = typed.types[variable]
    if not kind.is_floating_point() and typed.node.op_type not in _EXACT:
        return None
    if variable not in typed.inputs and _typing_attribute(typed.node) is None:
        return None
    known = kernel_types(operator_name(typed.node))
    assert known is not None
    return next((w for w in _WIDER.get(kind, ()) if w in known[variable]), None)


def _typing_attribute(node: ir.Node) -> str | None:
    """Return the name of the attribute that determines the output's type."""
    if node.op_type == "ConstantOfShape":
        return "value"
    return "dtype" if "dtype" in node.attributes else None


# The lower half of the bits.
_LOW = (1 << 32) - 1


def _sum_exactly(node: ir.Node) -> None:
    """Add integers up in two halves, each exact in a double. An overflow wraps, as in eager."""
    value, result = node.inputs[0], node.outputs[0]
    if value is None or value.dtype != _INT64:
        return
    source = value.producer()
    if source is not None and source.op_type == "Cast" and source.inputs[0].dtype != _INT64:  # type: ignore[union-attr]
        return
    mask, weight = (
        ir.node("Constant", [], {"value": ir.tensor(number, dtype=_INT64)}) for number in (_LOW, _LOW + 1)
    )
    low = ir.node("BitwiseAnd", [value, mask.outputs[0]])
    rest = ir.node("Sub", [value, low.outputs[0]])
    high = ir.node("Div", [rest.outputs[0], weight.outputs[0]])
    sums = [
        ir.node("ReduceSum", [half.outputs[0], *node.inputs[1:]], node.attributes) for half in (low, high)
    ]
    weighed = ir.node("Mul", [sums[1].outputs[0], weight.outputs[0]])
    total = ir.node("Add", [sums[0].outputs[0], weighed.outputs[0]])
    assert node.graph is not None
    for made in (mask, weight, low, rest, high, *sums, weighed, total):
        made.metadata_props.update(node.metadata_props)
        made.outputs[0].dtype = _INT64
        node.graph.insert_before(node, made)
    total.outputs[0].name, total.outputs[0].shape = result.name, result.shape
    result.name = f"{result.name}.replaced"
    ir.convenience.replace_all_uses_with(result, total.outputs[0], replace_graph_outputs=True)
    node.graph.remove(node, safe=True)


class _Casts:
    """The conversions of one graph."""

    def __init__(self) -> None:
        self._wide: dict[tuple[ir.Value, ir.DataType, ir.Graph | None], ir.Value] = {}
        # A result in its original type -> the value computed in the wider type.
        self._computed: dict[ir.Value, ir.Value] = {}

    def widen(self, typed: Typed, variable: str, kind: ir.DataType) -> None:
        """Make a node compute ``variable`` in the type ``kind``."""
        node = typed.node
        for i, (value, own) in enumerate(zip(node.inputs, typed.inputs, strict=True)):
            if value is not None and own == variable:
                node.replace_input_with(i, self._widen(node, value, kind))
        if variable not in typed.inputs:
            _retype(node, kind)
        for value, own in zip(node.outputs, typed.outputs, strict=True):
            if own == variable:
                self._narrow(node, value, typed.types[variable], kind)

    def _widen(self, node: ir.Node, value: ir.Value, kind: ir.DataType) -> ir.Value:
        computed = self._computed.get(value)
        if computed is not None and kind.is_floating_point() and _of_one_operator(computed, node):
            # PyTorch rounds the result of an operator, not its intermediate values.
            return computed
        graph = node.graph
        assert graph is None or isinstance(graph, ir.Graph)
        key = (value, kind, graph)
        if key not in self._wide:
            cast = _cast(value, kind, node)
            assert graph is not None
            graph.insert_before(node, cast)
            cast.outputs[0].shape = value.shape
            self._wide[key] = cast.outputs[0]
        return self._wide[key]

    def _narrow(self, node: ir.Node, value: ir.Value, kind: ir.DataType, wide: ir.DataType) -> None:
        cast = _cast(value, kind, node)
        result = cast.outputs[0]
        result.name, value.name = value.name, f"{value.name}.wide"
        result.shape = value.shape
        result.metadata_props.update(value.metadata_props)
        ir.convenience.replace_all_uses_with(value, result, replace_graph_outputs=True)
        cast.replace_input_with(0, value)
        value.dtype = wide
        assert node.graph is not None
        node.graph.insert_after(node, cast)
        self._computed[result] = value

    def forget_unread(self) -> None:
        """Remove the unused casts of results to their original type."""
        for result in self._computed:
            node = result.producer()
            unread = not result.uses() and not result.is_graph_output()
            if unread and node is not None and node.graph is not None:
                node.graph.remove(node, safe=True)


def _of_one_operator(value: ir.Value, node: ir.Node) -> bool:
    producer = value.producer()
    return producer is not None and fx_name(producer) == fx_name(node)


def _retype(node: ir.Node, kind: ir.DataType) -> None:
    """Change the attribute that determines the type of a node's output."""
    if node.op_type == "ConstantOfShape":
        number = node.attributes["value"].as_tensor().numpy().astype(kind.numpy())
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(number))
    else:
        node.attributes["dtype"] = ir.AttrInt64("dtype", int(kind))


def _cast(value: ir.Value, kind: ir.DataType, beside: ir.Node) -> ir.Node:
    cast = ir.Node("", "Cast", [value], [ir.AttrInt64("to", int(kind))], num_outputs=1)
    cast.outputs[0].dtype = kind
    cast.metadata_props.update(beside.metadata_props)
    return cast
