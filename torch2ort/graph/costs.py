"""The costs of a graph's nodes: operations on floating-point numbers, and bytes read and written.

A product of matrices counts two operations for each multiplication and addition, an elementwise operator one
per element of its output, a reduction one per element of its input, a normalization five. An operator that
only moves data counts none. The cost of a Python call is unknown.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx

_MOVES = frozenset(
    {
        *("Cast", "CastLike", "Compress", "Concat", "Constant", "ConstantOfShape", "DepthToSpace", "Expand"),
        *(
            "EyeLike",
            "Flatten",
            "Gather",
            "GatherElements",
            "GatherND",
            "Identity",
            "NonZero",
            "OneHot",
            "Pad",
        ),
        *("Range", "Reshape", "ScatterElements", "ScatterND", "Shape", "Size", "Slice", "SpaceToDepth"),
        *("Split", "Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where"),
    }
)
_NORMALISES = frozenset(
    {
        *("BatchNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization"),
        *("LogSoftmax", "LpNormalization", "RMSNormalization", "Softmax"),
    }
)
_PYTHON = frozenset({"PythonOp", "PythonOpGrad", "ATen"})
_PRODUCTS = frozenset({"MatMul", "FusedMatMul", "Gemm", "FusedGemm", "MatMulInteger"})
_RECURRENT = {"LSTM": 4, "GRU": 3, "RNN": 1}
_PER_NORMALISED = 5
# The operators that expressions of sizes consist of.
_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "floor": math.floor,
    "ceiling": math.ceil,
    "Max": max,
    "Min": min,
    "Mod": operator.mod,
}

_Shape = tuple[int, ...]


@dataclass(frozen=True)
class Cost:
    """The cost of one node.

    Attributes:
        kind: the operator, with its domain if that is not ONNX's own.
        flops: operations; ``None`` if unknown.
        bytes: read and written; ``None`` if a shape is not known.
    """

    kind: str
    flops: int | None
    bytes: int | None


class Costs:
    """The costs of a graph's nodes.

    Args:
        graph: with the shapes of its values.
        sizes: values of named sizes; a missing one counts as 1.
    """

    def __init__(self, graph: onnx.GraphProto, sizes: Mapping[str, int] | None = None) -> None:
        self._sizes = dict(sizes or {})
        self.free: set[str] = set()
        self._values: dict[str, tuple[_Shape, int]] = {}
        for value in (*graph.input, *graph.output, *graph.value_info):
            kind = value.type.tensor_type
            if value.type.HasField("tensor_type") and kind.HasField("shape"):
                shape = self._shape(kind.shape)
                if shape is not None:
                    self._values[value.name] = shape, _width(kind.elem_type)
        for tensor in graph.initializer:
            self._values[tensor.name] = tuple(tensor.dims), _width(tensor.data_type)
        self._graph = graph

    def __iter__(self) -> Iterator[Cost]:
        """Yield the cost of each node, in the order of the nodes."""
        return (self.of(node) for node in self._graph.node)

    def of(self, node: onnx.NodeProto) -> Cost:
        """Return the cost of a node."""
        kind = node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}::{node.op_type}"
        # The first output of a Python call is the handle of its context.
        outputs = node.output[1:] if node.op_type in _PYTHON else node.output
        names = [name for name in (*node.input, *outputs) if name]
        known = [self._values[name] for name in names if name in self._values]
        size = sum(math.prod(shape) * width for shape, width in known) if len(known) == len(names) else None
        return Cost(kind, self._flops(node), size)

    def _flops(self, node: onnx.NodeProto) -> int | None:
        kind = node.op_type
        if kind in _PYTHON:
            return None
        if kind in _MOVES:
            return 0
        inputs = [self._values[name][0] if name in self._values else None for name in node.input]
        outputs = [self._values[name][0] if name in self._values else None for name in node.output]
        if not outputs or outputs[0] is None or (not inputs and kind in _PRODUCTS):
            return None
        result = math.prod(outputs[0])
        if kind in _PRODUCTS or kind in ("Conv", "ConvTranspose") or kind in _RECURRENT:
            if any(shape is None for shape in inputs[:2]):
                return None
            return _product(node, [shape or () for shape in inputs], result)
        if kind in _NORMALISES:
            return _PER_NORMALISED * result
        if kind.startswith(("Reduce", "Arg", "Cum")) or kind.endswith("Pool") or kind == "Sum":
            return None if None in inputs[:1] else max(math.prod(inputs[0] or ()), result)
        return result

    def _shape(self, shape: onnx.TensorShapeProto) -> _Shape | None:
        sizes = []
        for dim in shape.dim:
            if dim.dim_param:
                size = self._evaluate(dim.dim_param)
            else:
                size = dim.dim_value if dim.HasField("dim_value") else None
            if size is None:
                return None
            sizes.append(size)
        return tuple(sizes)

    def _evaluate(self, text: str) -> int | None:
        """Return the value of an expression such as ``2*batch``; the text of a file is never executed."""
        try:
            return int(self._value(ast.parse(text, mode="eval").body))
        except (SyntaxError, ValueError, ArithmeticError, RecursionError):
            return None

    def _value(self, node: ast.expr) -> float:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name):
            if node.id not in self._sizes:
                self.free.add(node.id)
            return self._sizes.get(node.id, 1)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return _ARITHMETIC[type(node.op)](self._value(node.left), self._value(node.right))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
            return _FUNCTIONS[node.func.id](*map(self._value, node.args))
        raise ValueError("no arithmetic of sizes")


def _product(node: onnx.NodeProto, inputs: Sequence[_Shape], result: int) -> int | None:
    kind, first, second = node.op_type, inputs[0], inputs[1]
    if kind in _RECURRENT:
        # (time, batch, input) and (directions, gates * hidden, input).
        gates = _RECURRENT[kind]
        hidden = second[1] // gates
        return 2 * first[0] * first[1] * second[0] * gates * hidden * (first[2] + hidden)
    if kind == "Conv":
        return 2 * result * math.prod(second[1:])
    if kind == "ConvTranspose":
        return 2 * math.prod(first) * math.prod(second[1:])
    flags = {a.name: a.i for a in node.attribute}
    if not first:
        return None
    transposed = flags.get("transA", 0) and len(first) > 1
    return 2 * result * (first[-2] if transposed else first[-1])


def _width(element: int) -> int:
    """Return the bytes of an element; 0 for strings."""
    try:
        return int(onnx.helper.tensor_dtype_to_np_dtype(element).itemsize)
    except (KeyError, ValueError, TypeError):
        return 0
