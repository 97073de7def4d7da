"""Constant folding in an evaluated model: of weights, and of normalizations and padding into convolutions.

After ``W x + b`` a normalization computes ``s (W x + b - mean) + shift`` with ``s = scale / sqrt(var + eps)``
(Ioffe and Szegedy, 2015), which is ``(s W) x + (s (b - mean) + shift)``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from torch2ort.graph.graph_traversal import values_read
from torch2ort.graph.refinements import check_of, is_check
from torch2ort.kernels.index_check import are_inside, decode_check

SUFFIX = ".folded"
_LINEAR = frozenset({"Conv", "ConvTranspose", "Gemm"})
# Operators that only move elements.
_MOVES = frozenset({"Concat", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})
# Operators that compute numbers or repeat them; folded for the types below.
_COMPUTES = frozenset(
    {"Abs", "Add", "And", "Cast", "Cos", "Div", "Equal", "Exp", "Expand", "Gather", "GatherND", "Greater"}
    | {"Less", "Log", "MatMul", "Mul", "Neg", "Not", "Or", "Pow", "Reciprocal", "ReduceL2", "ReduceMax"}
    | {"ReduceMean", "ReduceSum", "Sigmoid", "Sin", "Softplus", "Sqrt", "Sub", "Tanh", "Where"}
)
_COMPUTED: dict[int, int] = {
    onnx.TensorProto.FLOAT: 4,
    onnx.TensorProto.DOUBLE: 8,
    onnx.TensorProto.INT64: 8,
    onnx.TensorProto.BOOL: 1,
}
# The most elements of a tensor that may be stored twice.
_SMALL = 64
# The most bytes of a result that may be larger than its inputs.
_FEW = 4096
_WHOLE = frozenset({onnx.TensorProto.INT64, onnx.TensorProto.BOOL})
_FLOATS = frozenset({onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16})

_Array = np.ndarray[Any, np.dtype[Any]]


def fold_weights(model: onnx.ModelProto) -> None:
    """Compute values of weights; fold batch normalizations and zero padding into convolutions and Gemm.

    A computed initializer is named ``<name of the weight>.folded``. Weights that a graph input may replace,
    results that another node also reads, and values that would no longer be finite are left unchanged.

    Args:
        model: has its weights as initializers; changed in place.
    """
    folding = _Folding(model.graph)
    folding.compute(model.opset_import)
    while folding.copies():
        folding.compute(model.opset_import)
    for node in list(model.graph.node):
        if node.domain:
            continue
        if node.op_type == "BatchNormalization":
            folding.normalization(node)
        elif node.op_type == "Conv":
            folding.padding(node)
    folding.drop()


class _Folding:
    def __init__(self, graph: onnx.GraphProto) -> None:
        self._graph = graph
        inputs = {value.name for value in graph.input}
        self._tensors = {t.name: t for t in graph.initializer if t.name not in inputs}
        self._names = {t.name for t in graph.initializer} | inputs
        self._readers = Counter(values_read(graph))
        self._makers = {name: node for node in graph.node if not node.domain for name in node.output}
        self._gone: list[onnx.NodeProto] = []
        values = (*graph.value_info, *graph.output)
        self._bytes = {v.name: _size(v.type.tensor_type) for v in values}
        self._types = {v.name: v.type.tensor_type.elem_type for v in values}
        self._types.update({tensor.name: tensor.data_type for tensor in graph.initializer})

    def compute(self, opsets: Iterable[onnx.OperatorSetIdProto]) -> None:
        """Compute the values that depend only on weights, unless a large weight would be stored twice."""
        nodes = self._nodes_of_weights()
        if not nodes:
            return
        made = {node.output[0] for node in nodes}
        inside = Counter(name for node in nodes for name in node.input)
        results = [name for name in made if self._readers[name] > inside[name]]
        sources = {name for node in nodes for name in node.input if name and name not in made}
        constants = [self._makers[name] for name in sources if name not in self._tensors]
        graph = helper.make_graph(
            [*constants, *nodes],
            "weights",
            [],
            [onnx.ValueInfoProto(name=name) for name in results],
            [self._tensors[name] for name in sources & self._tensors.keys()],
        )
        values = ReferenceEvaluator(helper.make_model(graph, opset_imports=opsets)).run(None, {})
        of: dict[str, str] = {}
        for node in nodes:
            weights = (of.get(name, name) for name in node.input if name in of or name in self._tensors)
            of[node.output[0]] = next(weights, node.output[0])
        names = {r: self._add_initializer(of[r], value) for r, value in zip(results, values, strict=True)}
        self._readers.subtract(inside)
        self._gone += nodes
        self._rename(names)

    def _rename(self, names: Mapping[str, str]) -> None:
        """Replace the inputs of the remaining nodes by other values."""
        for node in self._nodes():
            for i, name in enumerate(node.input):
                if name in names:
                    node.input[i] = names[name]
                    self._readers.update([names[name]])
                    self._readers.subtract([name])

    def _nodes(self) -> list[onnx.NodeProto]:
        """Return the remaining nodes."""
        gone = {id(node) for node in self._gone}
        return [node for node in self._graph.node if id(node) not in gone]

    def _fixed_names(self) -> set[str]:
        """Return the values whose names must not change: those that bodies read, and the graph's outputs."""
        outside = Counter(name for node in self._nodes() for name in node.input)
        return {name for name, count in self._readers.items() if count != outside[name]}

    def _nodes_of_weights(self) -> list[onnx.NodeProto]:
        """Return the nodes that depend only on weights, in their order."""
        fixed = self._fixed_names()
        nodes = [
            n
            for n in self._nodes()
            if not n.domain and (n.op_type in _MOVES or self._is_cheap(n)) and n.output[0] not in fixed
        ]
        while True:
            known: set[str] = set()
            kept = []
            inside = Counter(name for node in nodes for name in node.input)
            for node in nodes:
                if all(not name or name in known or self._is_free(name, inside) for name in node.input):
                    known.update(node.output)
                    kept.append(node)
            if len(kept) == len(nodes):
                return nodes
            nodes = kept

    def _is_cheap(self, node: onnx.NodeProto) -> bool:
        """Return True if a node computes numbers, and its result makes the file no larger."""
        if node.op_type not in _COMPUTES or (node.op_type == "Cast" and self._rounds(node)):
            return False
        size = self._bytes.get(node.output[0])
        return size is not None and size <= max(_FEW, sum(map(self._size_of, node.input)))

    def _rounds(self, node: onnx.NodeProto) -> bool:
        """Return True if a node casts fractions to integers: beyond the range that depends on the machine."""
        to = next(attribute.i for attribute in node.attribute if attribute.name == "to")
        return to == onnx.TensorProto.INT64 and self._types.get(node.input[0]) not in _WHOLE

    def _size_of(self, name: str) -> int:
        tensor = self._tensors.get(name)
        if tensor is None:
            return self._bytes.get(name) or 0
        elements: int = math.prod(tensor.dims)
        return elements * _COMPUTED.get(tensor.data_type, 0)

    def _is_free(self, name: str, inside: Mapping[str, int]) -> bool:
        """Return True if a value is known, and is either small or read only by the nodes that are folded."""
        if name not in self._tensors:
            return name in self._makers and self._makers[name].op_type == "Constant"
        return math.prod(self._tensors[name].dims) <= _SMALL or self._readers[name] == inside[name]

    def copies(self) -> bool:
        """Drop nodes that are now known to return their first input; return True if there are any."""
        fixed = self._fixed_names()
        copies = [n for n in self._nodes() if n.output[0] not in fixed]
        copies = [n for n in copies if (self._passes(n) if is_check(n) else self._keeps_size(n))]
        for node in copies:
            self._readers.subtract(node.input)
        self._gone += copies
        self._rename({node.output[0]: node.input[0] for node in copies})
        return bool(copies)

    def _passes(self, node: onnx.NodeProto) -> bool:
        """Return True if the index that a node checks is known, and is within bounds."""
        check = decode_check(check_of(node))
        tensors = node.input[1:]
        index = self._constant(tensors[check.index])
        source = None if check.source is None else self._tensors.get(tensors[check.source])
        if index is None or (source is None and check.source is not None):
            return False
        return are_inside(check, torch.from_numpy(index.copy()), () if source is None else source.dims)

    def _keeps_size(self, node: onnx.NodeProto) -> bool:
        """Return True if a node resizes a known, finite image to its own size: kernels make NaN of inf."""
        if node.op_type != "Resize" or any(node.input[1:3]):
            return False
        image, sizes = self._float(node.input[0]), self._constant(node.input[3])
        if image is None or sizes is None or not np.isfinite(image).all():
            return False
        return bool((*sizes,) == image.shape)

    def normalization(self, node: onnx.NodeProto) -> None:
        """Fold a batch normalization into the node before it, if the result is exact."""
        linear = self._only_for(node)
        attributes = _attributes(node)
        if linear is None or linear.op_type not in _LINEAR or attributes.get("training_mode"):
            return
        weights = [self._float(name) for name in (*linear.input[1:], *node.input[1:])]
        if not all(w is not None for w in weights):
            return
        weight, *bias, scale, shift, mean, variance = (w.astype(np.float64) for w in weights if w is not None)
        of_linear = _attributes(linear)
        before = bias[0] * of_linear.get("beta", 1.0) if bias else np.zeros_like(mean)
        if before.ndim > 1:
            return
        with np.errstate(all="ignore"):
            factor = scale / np.sqrt(variance + attributes.get("epsilon", np.float32(1e-5)))
            folded = _scaled(linear.op_type, weight, factor, of_linear), (before - mean) * factor + shift
            kind = weights[0].dtype if weights[0] is not None else np.float32
            new = [array.astype(kind) for array in folded]
        if not all(np.isfinite(array).all() for array in new):
            return
        names = [linear.input[1], linear.input[2] if bias else node.input[2]]
        arguments = [self._add_initializer(name, array) for name, array in zip(names, new, strict=True)]
        self._readers.subtract([*linear.input[1:], *node.input])
        self._readers.update(arguments)
        del linear.input[1:]
        linear.input.extend(arguments)
        linear.output[0] = node.output[0]
        self._makers[node.output[0]] = linear
        for attribute in [a for a in linear.attribute if a.name == "beta"]:
            linear.attribute.remove(attribute)
        self._gone.append(node)

    def padding(self, node: onnx.NodeProto) -> None:
        """Fold zero padding into the convolution that reads it, if its weights are finite: 0 * inf is NaN."""
        pad = self._only_for(node)
        weight = self._float(node.input[1])
        if pad is None or pad.op_type != "Pad" or weight is None or not np.isfinite(weight).all():
            return
        attributes = _attributes(node)
        inputs = [self._constant(name) for name in pad.input[1:]]
        if any(name and found is None for name, found in zip(pad.input[1:], inputs, strict=True)):
            return
        pads, value, axes = (*inputs, None, None)[:3]
        if pads is None or (value is not None and value.any()):
            return
        if _attributes(pad).get("mode", b"constant") != b"constant":
            return
        if attributes.get("auto_pad", b"NOTSET") != b"NOTSET":
            return
        rank = weight.ndim
        places = range(rank) if axes is None else [int(axis) % rank for axis in axes]
        sizes = np.zeros((2, rank), np.int64)
        sizes[:, list(places)] = pads.reshape(2, -1)
        if sizes[:, :2].any() or (sizes < 0).any():
            return
        before = np.array(attributes.get("pads", [0] * 2 * (rank - 2))).reshape(2, rank - 2)
        for attribute in [a for a in node.attribute if a.name == "pads"]:
            node.attribute.remove(attribute)
        node.attribute.append(onnx.helper.make_attribute("pads", (before + sizes[:, 2:]).flatten().tolist()))
        self._readers.subtract([node.input[0], *pad.input[1:]])
        node.input[0] = pad.input[0]
        self._gone.append(pad)

    def drop(self) -> None:
        """Drop the nodes that were folded, and the constants, types and initializers that become unused."""
        if not self._gone:
            return
        unread = {name for name, count in self._readers.items() if count <= 0}
        nodes = [n for n in self._nodes() if not (n.op_type == "Constant" and unread >= {*n.output})]
        values = [value for value in self._graph.value_info if value.name not in unread]
        for field, kept in ((self._graph.node, nodes), (self._graph.value_info, values)):
            del field[:]
            field.extend(kept)
        for name in unread & self._tensors.keys():
            self._graph.initializer.remove(self._tensors[name])

    def _only_for(self, node: onnx.NodeProto) -> onnx.NodeProto | None:
        """Return the node that computes the first input, if no other node reads that."""
        return self._makers.get(node.input[0]) if self._readers[node.input[0]] == 1 else None

    def _float(self, name: str) -> _Array | None:
        """Return an initializer that no input can replace, if it is of floating-point numbers."""
        tensor = self._tensors.get(name)
        return numpy_helper.to_array(tensor) if tensor is not None and tensor.data_type in _FLOATS else None

    def _constant(self, name: str) -> _Array | None:
        """Return the value of an initializer or a Constant; ``None`` for other values."""
        if name in self._tensors:
            return numpy_helper.to_array(self._tensors[name])
        maker = self._makers.get(name)
        if maker is None or maker.op_type != "Constant":
            return None
        value = _attributes(maker).get("value")
        return None if value is None else numpy_helper.to_array(value)

    def _add_initializer(self, name: str, array: _Array) -> str:
        """Add an initializer under an unused name; return the name."""
        base = f"{name.removesuffix(SUFFIX)}{SUFFIX}"
        free = base
        count = 1
        while free in self._names:
            count += 1
            free = f"{base}_{count}"
        self._names.add(free)
        tensor = self._graph.initializer.add()
        # ascontiguousarray gives an array without dimensions one dimension.
        dense = np.ascontiguousarray(array).reshape(array.shape)
        tensor.CopyFrom(numpy_helper.from_array(dense, free))
        self._tensors[free] = tensor
        return free


def _size(tensor: onnx.TypeProto.Tensor) -> int | None:
    """Return the bytes of a value, if its type is one that is computed here, and all its sizes are known."""
    sizes = [d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim]
    if tensor.elem_type not in _COMPUTED or not tensor.HasField("shape") or None in sizes:
        return None
    known: int = math.prod(size or 0 for size in sizes)
    return known * _COMPUTED[tensor.elem_type]


def _attributes(node: onnx.NodeProto) -> Mapping[str, Any]:
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def _scaled(op_type: str, weight: _Array, factor: _Array, attributes: Mapping[str, Any]) -> _Array:
    """Return a weight with each of its outputs multiplied by a factor."""
    if op_type == "ConvTranspose":
        # The weight has the inputs of all groups and the outputs of one: a group's factors apply to its
        # inputs.
        groups = attributes.get("group", 1)
        parts = weight.reshape(groups, -1, *weight.shape[1:])
        shape = (groups, 1, weight.shape[1], *[1] * (weight.ndim - 2))
        return np.reshape(parts * factor.reshape(shape), weight.shape)
    axis = 1 if op_type == "Gemm" and not attributes.get("transB") else 0
    factor = np.expand_dims(factor, [i for i in range(weight.ndim) if i != axis])
    scaled: _Array = weight * factor
    return scaled
