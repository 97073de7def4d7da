"""Matrix products over no elements, which are zeros.

onnxruntime leaves uninitialised memory in a product of a matrix with several, or with a vector (1.19 to
1.31), refuses a Gemm over no elements (1.19), or does not load the Gemm that it makes of MatMul and Add
(1.31). So the product is read only where it has elements to sum, and none of these products is a Gemm.
"""

from __future__ import annotations

import re
from typing import Any

import onnx_ir as ir

# A product of the inputs' own sizes; a graph whose sample had more than one element never runs on zero
# elements.
_POSITIVE = re.compile(r"(?!u\d)\w+(\*(?!u\d)\w+)*")


def guard_empty_matmuls(model: ir.Model) -> None:
    """Guard, in place, the products of a graph that may sum no elements, so that they return zeros."""
    for node in list(model.graph.all_nodes()):
        if node.op_type in ("Gemm", "MatMul") and not node.domain and not _sums_something(node):
            _guard(node)


def _sums_something(node: ir.Node) -> bool:
    """Return True if the shape of an operand shows that the summed dimension is not 0."""
    left, right = (None if v is None or v.shape is None else list(v.shape) for v in node.inputs[:2])
    found: list[Any] = []
    if left:
        found.append(left[0 if _given(node, "transA", 0) else -1])
    if right:
        found.append(right[-1] if _given(node, "transB", 0) else right[max(len(right) - 2, 0)])
    return any(size > 0 if isinstance(size, int) else _is_positive(size) for size in found)


def _is_positive(size: ir.SymbolicDim) -> bool:
    return size.value is not None and bool(_POSITIVE.fullmatch(size.value.replace(" ", "")))


def _given(node: ir.Node, name: str, default: Any) -> Any:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.value


def _guard(node: ir.Node) -> None:
    output = node.outputs[0]
    left, right, addend = (*node.inputs, None)[:3]
    dtype = output.dtype or (None if left is None else left.dtype)
    tape = ir.tape.Tape()

    def number(value: float, of: ir.DataType | None = dtype) -> ir.Value:
        return tape.op("Constant", [], {"value": ir.tensor(value, dtype=of)})

    if _given(node, "transA", 0):
        left = tape.op("Transpose", [left], {"perm": [1, 0]})
    if _given(node, "transB", 0):
        right = tape.op("Transpose", [right], {"perm": [1, 0]})
    product = tape.op("MatMul", [left, right])
    size = tape.op("Squeeze", [tape.op("Shape", [left], {"start": -1})])
    nothing = tape.op("Equal", [size, number(0, ir.DataType.INT64)])
    result = tape.op("Where", [nothing, number(0), product])
    alpha, beta = _given(node, "alpha", 1), _given(node, "beta", 1)
    if alpha != 1:
        result = tape.op("Mul", [result, number(alpha)])
    if addend is not None:
        result = tape.op("Add", [result, addend if beta == 1 else tape.op("Mul", [addend, number(beta)])])
    for made in tape.nodes:
        made.metadata_props.update(node.metadata_props)
    if dtype is not None:
        result.dtype, product.dtype = dtype, dtype
    assert node.graph is not None
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], tape.nodes, [output], [result])
