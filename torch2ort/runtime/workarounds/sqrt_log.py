"""Square roots and logarithms that are correct over the whole range of float32.

Up to onnxruntime 1.20 they are computed from an estimate: the root of infinity is NaN, the root of a number
below 1.2e-38 is zero, and its logarithm is that of 1.2e-38. In float64 all of these are normal numbers, and
the float64 root, rounded, is the correctly rounded root (Figueroa, When is double rounding innocuous?, 1995).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from torch2ort.graph.graph_traversal import graphs_in
from torch2ort.runtime.kernel_support import probe_session

_ROOTS_OF = frozenset({0.5, -0.5})
_NUMBERS = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT32, TensorProto.INT64})


@functools.cache
def computes_whole_range() -> bool:
    """Return True if the installed onnxruntime computes them over the whole range; determined by a run."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [8]) for name in "xyz"]
    graph = helper.make_graph(
        [helper.make_node("Sqrt", ["x"], ["y"]), helper.make_node("Log", ["x"], ["z"])],
        "probe",
        values[:1],
        values[1:],
    )
    # Eight fill a vector register: remaining elements are computed one by one, and correctly.
    roots, logarithms = probe_session(graph).run(None, {"x": np.full(8, 1e-40, np.float32)})
    return bool(np.allclose(roots, 1e-20, rtol=1e-3, atol=0) and np.allclose(logarithms, -92.1034, rtol=1e-3))


def widen_roots(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return ``model``, or a copy whose roots and logarithms of float32 are computed in float64."""
    if not any(_is_wanted(n) for g in graphs_in(model.graph) for n in g.node) or computes_whole_range():
        return model
    made = onnx.ModelProto()
    made.CopyFrom(model)
    types: dict[str, int] = {}
    constants: dict[str, float] = {}
    for graph in graphs_in(made.graph):
        # A body reads values of the graphs around it, which come first.
        types |= _types(graph)
        constants |= _constants(graph)
        nodes = [part for node in graph.node for part in _widened(node, types, constants)]
        del graph.node[:]
        graph.node.extend(nodes)
    return made


def _is_wanted(node: onnx.NodeProto) -> bool:
    return node.op_type in ("Sqrt", "Log", "Pow") and not node.domain


def _widened(
    node: onnx.NodeProto, types: Mapping[str, int], constants: Mapping[str, float]
) -> Iterator[onnx.NodeProto]:
    wanted = _is_wanted(node) and types.get(node.input[0]) == TensorProto.FLOAT
    if wanted and node.op_type == "Pow":
        # Its kernel computes a root where the exponent is 0.5; a power with another constant exponent stays.
        wanted = constants.get(node.input[1], 0.5) in _ROOTS_OF
    if not wanted:
        yield node
        return
    result = node.output[0]
    wide = onnx.NodeProto()
    wide.CopyFrom(node)
    wide.output[0] = f"{result}/wide"
    # One name may occur several times.
    for source in dict.fromkeys(node.input[: 1 if node.op_type != "Pow" else 2]):
        cast = f"{result}/wide/{source}"
        yield helper.make_node("Cast", [source], [cast], name=cast, to=TensorProto.DOUBLE)
        for i, name in enumerate(node.input):
            if name == source:
                wide.input[i] = cast
    yield wide
    yield helper.make_node("Cast", [wide.output[0]], [result], name=f"{result}/narrow", to=TensorProto.FLOAT)


def _types(graph: onnx.GraphProto) -> dict[str, int]:
    values = (*graph.input, *graph.output, *graph.value_info)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    return types | {tensor.name: tensor.data_type for tensor in graph.initializer}


def _constants(graph: onnx.GraphProto) -> dict[str, float]:
    """Return the number in each constant; NaN for one of several elements, which is no root's exponent."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    tensors |= {
        node.output[0]: attribute.t
        for node in graph.node
        if node.op_type == "Constant"
        for attribute in node.attribute
        if attribute.name == "value"
    }
    numbers = {name: numpy_helper.to_array(t) for name, t in tensors.items() if t.data_type in _NUMBERS}
    return {name: float(n.item()) if n.size == 1 else np.nan for name, n in numbers.items()}
