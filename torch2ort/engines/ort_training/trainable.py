"""What onnxruntime-training 1.19.2 differentiates correctly: a positive list."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from torch2ort.symbolics.gradient_nodes import gradient_nodes
from torch2ort.symbolics.registered.gradient_definitions import gradient_of
from torch2ort.symbolics.source import fx_name

# Nothing, or why the node cannot be differentiated; given the positions of inputs that carry a gradient.
Rule = Callable[[ir.Node, frozenset[int]], "str | None"]


def untrainable_nodes(model: ir.Model, trained: frozenset[str]) -> dict[str, str]:
    """Nodes on the way of a gradient that have no correct one.

    Args:
        model: the graph.
        trained: names of the initializers and inputs that require a gradient.

    Returns:
        Name of the FX node that each such node was translated from (its own name where it is
        unknown) -> operator and reason.
    """
    wrong: dict[str, str] = {}
    for node, inputs in gradient_nodes(model, trained):
        reason = _reason(node, inputs)
        if reason is not None:
            wrong.setdefault(fx_name(node), reason)
    for node in model.graph:
        if _name(node) in _NEVER_DOUBLE and node.outputs[0].dtype == ir.DataType.DOUBLE:
            wrong.setdefault(fx_name(node), f"{_name(node)} in double precision")
    return wrong


def _reason(node: ir.Node, inputs: frozenset[int]) -> str | None:
    name = _name(node)
    if name not in _ALSO_DOUBLE and any(v.dtype == ir.DataType.DOUBLE for v in node.outputs):
        return f"{name} in double precision"
    registered = gradient_of(node)
    rule = _RULES.get(name) if registered is None else _only(*registered.inputs)
    if rule is None:
        return name
    reason = rule(node, inputs)
    return None if reason is None else f"{name} {reason}"


def _name(node: ir.Node) -> str:
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type


def _fine(node: ir.Node, inputs: frozenset[int]) -> str | None:
    return None


def _only(*positions: int) -> Rule:
    def rule(node: ir.Node, inputs: frozenset[int]) -> str | None:
        others = sorted(inputs - set(positions))
        return f"with respect to input {others[0]}" if others else None

    return rule


def _where(node: ir.Node, inputs: frozenset[int]) -> str | None:
    shape = node.outputs[0].shape
    if shape is None or any(_shape(node, i) != shape for i in inputs):
        return "of branches that are broadcast"
    return _only(1, 2)(node, inputs)


def _pow(node: ir.Node, inputs: frozenset[int]) -> str | None:
    exponent = ir.convenience.get_const_tensor(node.inputs[1]) if node.inputs[1] is not None else None
    if exponent is None or exponent.size != 1:
        return "with an exponent that is no constant number"
    if exponent.dtype != node.outputs[0].dtype or not exponent.numpy():
        return "with an exponent of another type, or zero"
    return _only(0)(node, inputs)


def _pool(node: ir.Node, inputs: frozenset[int]) -> str | None:
    # The gradient kernel takes the shape that the graph says, even where it says -1.
    shape = _shape(node, 0)
    if shape is None or not shape.is_static():
        return "of a size that varies"
    if node.op_type == "AveragePool" and len(shape) > 4:
        return "over three or more dimensions"
    return _only(0)(node, inputs)


def _conv(node: ir.Node, inputs: frozenset[int]) -> str | None:
    # With groups, the gradient kernel clears more than the input's gradient, unless there are two dimensions.
    weight = _shape(node, 1)
    if node.attributes.get_int("group", 1) == 1 or (weight is not None and len(weight) == 4):
        return None
    return "in groups over one dimension or three"


def _shape(node: ir.Node, position: int) -> ir.Shape | None:
    value = node.inputs[position]
    return None if value is None else value.shape


def _layer_norm(node: ir.Node, inputs: frozenset[int]) -> str | None:
    # The gradient kernel fails, in the first step.
    scale = _shape(node, 1)
    one = scale is not None and all(isinstance(size, int) and size == 1 for size in scale)
    return "over one element" if one else None


def _matmul(node: ir.Node, inputs: frozenset[int]) -> str | None:
    ranks = [None if v is None or v.shape is None else len(v.shape) for v in node.inputs]
    return "of a vector" if any(r is None or r < 2 for r in ranks) else None


def _attribute(name: str, *allowed: object) -> Rule:
    def rule(node: ir.Node, inputs: frozenset[int]) -> str | None:
        attribute = node.attributes.get(name)
        if attribute is None or attribute.value in allowed:
            return None
        return f"with {name}={attribute.value!r}"

    return rule


def _pad(node: ir.Node, inputs: frozenset[int]) -> str | None:
    if len(node.inputs) > 3:
        return "with axes"
    return _attribute("mode", "constant")(node, inputs) or _only(0)(node, inputs)


# Those whose kernels, of the operator and of its gradient, exist for double as well as for float.
_ALSO_DOUBLE = frozenset(
    {
        "Abs", "Add", "Cast", "Div", "Exp", "Expand", "Gather", "GatherElements", "Gemm", "Identity", "Log",
        "Max", "Min", "Mul", "Neg", "Pad", "Pow", "Reciprocal", "ReduceSum", "Reshape", "ScatterElements",
        "Sigmoid", "Slice", "SoftmaxCrossEntropyLoss", "Split", "Sqrt", "Squeeze", "Sub", "Tanh", "Tile",
        "TopK", "Transpose", "Trilu", "Unsqueeze", "Where", "com.microsoft::PythonOp",
        "org.pytorch.aten::ATen",
    }
)  # fmt: skip

# Those that have no kernel for double at all.
_NEVER_DOUBLE = frozenset(
    {"AveragePool", "Conv", "Cos", "Erf", "com.microsoft::FastGelu", "com.microsoft::Gelu"}
)

_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        (
            "Abs", "Add", "Cast", "Concat", "Cos", "Div", "Erf", "Exp", "Gemm", "Identity",
            "Log", "LogSoftmax", "Max", "Min", "Mul", "Neg", "Reciprocal", "Relu",
            "Sigmoid", "Sin", "Softmax", "Sqrt", "Sub", "Tanh", "com.microsoft::FastGelu",
            "com.microsoft::Gelu", "com.microsoft::PythonOp", "org.pytorch.aten::ATen",
        ),
        _fine,
    ),
    **dict.fromkeys(
        (
            "Expand", "Gather", "GatherElements", "GatherND", "ReduceSum", "Reshape",
            "Slice", "SoftmaxCrossEntropyLoss", "Split", "Squeeze", "Tile", "TopK", "Transpose", "Trilu",
            "Unsqueeze",
        ),
        _only(0),
    ),
    "AveragePool": _pool,
    "Conv": _conv,
    "LayerNormalization": _layer_norm,
    "MatMul": _matmul,
    "MaxPool": _pool,
    "Pad": _pad,
    "Pow": _pow,
    "ScatterElements": _attribute("reduction", "none"),
    "ScatterND": _attribute("reduction", "none"),
    "Where": _where,
}  # fmt: skip
