"""Operators of later opsets that replace, in files, the nodes that compute the same.

Swish came with opset 24, RMSNormalization and Attention with 23. A graph that torch2ort runs contains the
nodes that PyTorch's operators were translated to. In a file one operator replaces them and stores them as its
metadata.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from google.protobuf import json_format
from onnx import helper, numpy_helper

from torch2ort.errors import ModelLoadError
from torch2ort.graph.exact_nodes import COMPOSED_META, changed_node
from torch2ort.graph.graph_traversal import copied, opset_of, values_read

_SWISH, _ATTENTION = 24, 23
_PARTS = frozenset(
    {"Add", "Constant", "Div", "MatMul", "Mul", "Pow", "Reciprocal", "ReduceMean", "Sigmoid", "Softmax"}
    | {"Sqrt", "Transpose"}
)
_OURS = "torch2ort."
# The operators that can compute the scores of attention.
_SCORES = ("MatMul", "Mul", "Div")
_FLOAT = onnx.TensorProto.FLOAT


def may_compose(model: onnx.ModelProto) -> bool:
    """Return True if the opset of a model has such operators."""
    return opset_of(model) >= _ATTENTION


def compose(model: onnx.ModelProto) -> None:
    """Replace nodes of a model by operators of later opsets; :func:`decompose` reverses this."""
    opset = opset_of(model)
    finders = [_attention, _rms_normalization] if opset >= _ATTENTION else []
    finders += [_swish] if opset >= _SWISH else []
    if not finders:
        return
    graph = _Graph(model.graph)
    for find in finders:
        for node in list(model.graph.node):
            found = find(graph, node)
            if found is not None:
                graph.replace(found)
    graph.write()


def decompose(model: onnx.ModelProto) -> None:
    """Replace the operators that :func:`compose` made by the nodes in their metadata.

    Raises:
        ModelLoadError: another tool changed an operator, or its metadata is damaged.
    """
    nodes: list[onnx.NodeProto] = []
    given_up: set[str] = set()
    graph = model.graph
    known = {value.name for value in (*graph.input, *graph.initializer)}
    for node in graph.node:
        text = next((prop.value for prop in node.metadata_props if prop.key == COMPOSED_META), None)
        parts = [node]
        if text is not None:
            parts, made, values = _recorded(node, text)
            given_up.update(made)
            graph.value_info.extend(values)
            read = {name for part in parts for name in part.input}
            if not read.issuperset({*node.input} - made - {""}):
                raise changed_node(node)
        for part in parts:
            if text is not None and not known.issuperset(filter(None, part.input)):
                raise changed_node(node)
            known.update(part.output)
            nodes.append(part)
    if len(nodes) != len(graph.node):
        kept = [copied(node) for node in nodes if given_up.isdisjoint(node.output)]
        del graph.node[:]
        graph.node.extend(kept)


@dataclass
class _Match:
    """Nodes, and the operator that replaces them.

    Attributes:
        node: the operator; its output is that of the last part.
        parts: the nodes, in order; no other node reads their outputs, except that of the last one.
        extra_nodes: additional nodes that compute inputs of the operator.
    """

    node: onnx.NodeProto
    parts: list[onnx.NodeProto]
    extra_nodes: list[onnx.NodeProto] = field(default_factory=list)


class _Graph:
    """A graph in which nodes are found by their outputs."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._graph = graph
        self._makers = {name: node for node in graph.node for name in node.output}
        self._readers = Counter(values_read(graph))
        self._tensors = {tensor.name: tensor for tensor in graph.initializer}
        self._values = {value.name: value for value in graph.value_info}
        values = (*graph.input, *graph.value_info, *graph.output)
        self._types = {value.name: value.type.tensor_type for value in values}
        self._instead: dict[int, _Match] = {}
        self._gone: set[int] = set()

    def sole_producer(self, name: str, operator: str) -> onnx.NodeProto | None:
        """Return the node that computes a value, if it is of this operator and the value is read once."""
        node = self._makers.get(name)
        is_one = node is not None and not node.domain and node.op_type == operator
        return node if is_one and self._readers[name] == 1 and id(node) not in self._gone else None

    def number(self, name: str) -> float | None:
        """Return a known value of one element as a number; ``None`` for other values."""
        array = self.array(name)
        return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None

    def array(self, name: str) -> np.ndarray[Any, Any] | None:
        """Return the value of an initializer or a Constant; ``None`` for other values."""
        node = self._makers.get(name)
        if node is not None and node.op_type == "Constant" and not node.domain:
            value = next((a.t for a in node.attribute if a.name == "value"), None)
            return None if value is None else numpy_helper.to_array(value)
        return numpy_helper.to_array(self._tensors[name]) if name in self._tensors else None

    def element(self, name: str) -> int:
        """Return the element type of a value; 0 if it is not known."""
        return self._tensors[name].data_type if name in self._tensors else self._type(name).elem_type

    def rank(self, name: str) -> int | None:
        """Return the rank of a value; ``None`` if it is not known."""
        shape = self.shape(name)
        return None if shape is None else len(shape)

    def shape(self, name: str) -> list[int | str] | None:
        """Return the sizes of a value, as numbers and names; ``None`` if one is not known."""
        if name in self._tensors:
            return list(self._tensors[name].dims)
        known = self._type(name)
        sizes = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in known.shape.dim]
        return None if "" in sizes or not known.HasField("shape") else sizes

    def _type(self, name: str) -> onnx.TypeProto.Tensor:
        found: onnx.TypeProto.Tensor = self._types.get(name, onnx.TypeProto.Tensor())
        return found

    def replace(self, found: _Match) -> None:
        """Replace the parts by their operator, in the place of the last one."""
        parts = [*self._own_constants(found.parts), *found.parts]
        bare = [json_format.MessageToDict(_bare(part)) for part in parts]
        inside = [part.output[0] for part in parts[:-1]]
        values = [json_format.MessageToDict(self._values[name]) for name in inside if name in self._values]
        record = {"made": [node.output[0] for node in found.extra_nodes], "parts": bare, "values": values}
        last = found.parts[-1]
        found.node.name = last.name
        found.node.metadata_props.extend(p for p in last.metadata_props if not p.key.startswith(_OURS))
        found.node.metadata_props.add(key=COMPOSED_META, value=json.dumps(record))
        self._instead[id(last)] = found
        self._gone.update(map(id, parts))

    def _own_constants(self, parts: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
        """Return the constants that only these nodes read."""
        read = Counter(name for part in parts for name in part.input)
        makers = [
            self._makers[name]
            for name, n in read.items()
            if name in self._makers and self._readers[name] == n
        ]
        return [node for node in makers if node.op_type == "Constant"]

    def write(self) -> None:
        """Write the operators into the graph."""
        nodes = []
        for node in self._graph.node:
            found = self._instead.get(id(node))
            if found is not None:
                nodes += [*found.extra_nodes, found.node]
            elif id(node) not in self._gone:
                nodes.append(node)
        kept = [copied(node) for node in nodes]
        made = {name for node in kept for name in node.output} | {v.name for v in self._graph.input}
        values = [_copy_value(v) for v in self._graph.value_info if v.name in made]
        del self._graph.node[:], self._graph.value_info[:]
        self._graph.node.extend(kept)
        self._graph.value_info.extend(values)


def _either(node: onnx.NodeProto) -> Iterator[tuple[str, str]]:
    """Yield the two inputs of a node, in both orders."""
    yield node.input[0], node.input[1]
    yield node.input[1], node.input[0]


def _swish(graph: _Graph, node: onnx.NodeProto) -> _Match | None:
    """Find ``x sigmoid(x)`` (Ramachandran et al., 2017)."""
    if node.op_type != "Mul" or node.domain:
        return None
    for x, gate in _either(node):
        sigmoid = graph.sole_producer(gate, "Sigmoid")
        if sigmoid is not None and sigmoid.input[0] == x and graph.element(x) == _FLOAT:
            return _Match(helper.make_node("Swish", [x], node.output), [sigmoid, node])
    return None


def _rms_normalization(graph: _Graph, node: onnx.NodeProto) -> _Match | None:
    """Find ``weight x / sqrt(mean(x^2) + epsilon)`` (Zhang and Sennrich, 2019), over the last dimension."""
    if node.op_type != "Mul" or node.domain:
        return None
    for weight, normal in _either(node):
        product = graph.sole_producer(normal, "Mul") if graph.rank(weight) == 1 else None
        for x, factor in _either(product) if product is not None else ():
            chain = _chain(graph, factor, ("Reciprocal", "Sqrt", "Add", "ReduceMean", "Pow"))
            if not chain or chain[-1].input[0] != x or graph.number(chain[-1].input[1]) != 2:
                continue
            mean, added = chain[3], chain[2]
            epsilon = graph.number(added.input[1])
            rank = graph.rank(x)
            axes = graph.array(mean.input[1]) if len(mean.input) > 1 else None
            keeps = next((a.i for a in mean.attribute if a.name == "keepdims"), 1)
            if (
                epsilon is None
                or rank is None
                or axes is None
                or [*axes] not in ([-1], [rank - 1])
                or not keeps
            ):
                continue
            if graph.element(x) != onnx.TensorProto.FLOAT or graph.element(weight) != onnx.TensorProto.FLOAT:
                continue
            made = helper.make_node("RMSNormalization", [x, weight], node.output, axis=-1, epsilon=epsilon)
            return _Match(made, [*chain[::-1], product, node])  # type: ignore[list-item]
    return None


def _chain(graph: _Graph, name: str, operators: Sequence[str]) -> list[onnx.NodeProto]:
    """Return a chain of nodes of these operators, each of which computes the first input of the one before.

    Empty if there is no such chain.
    """
    found: list[onnx.NodeProto] = []
    for operator in operators:
        node = graph.sole_producer(name, operator)
        if node is None:
            return []
        found.append(node)
        name = node.input[0]
    return found


def _attention(graph: _Graph, node: onnx.NodeProto) -> _Match | None:
    """Find ``softmax(scale q k^T + mask) v`` (Vaswani et al., 2017), of tensors of four dimensions."""
    softmax = (
        graph.sole_producer(node.input[0], "Softmax")
        if node.op_type == "MatMul" and not node.domain
        else None
    )
    if softmax is None or next((a.i for a in softmax.attribute if a.name == "axis"), -1) not in (-1, 3):
        return None
    parts, mask, scores = [softmax, node], "", softmax.input[0]
    added = graph.sole_producer(scores, "Add")
    if added is not None:
        parts.insert(0, added)
        both = [
            pair for pair in _either(added) if any(graph.sole_producer(pair[0], kind) for kind in _SCORES)
        ]
        if len(both) != 1:
            return None
        scores, mask = both[0]
    scores, divisor = _scaled(graph, scores, "Div", parts)
    scores, factor = _scaled(graph, scores, "Mul", parts)
    product = graph.sole_producer(scores, "MatMul")
    if product is None:
        return None
    parts.insert(0, product)
    q, scale = _scaled(graph, product.input[0], "Mul", parts)
    turned = graph.sole_producer(product.input[1], "Transpose")
    if turned is None:
        return None
    order = next((list(a.ints) for a in turned.attribute if a.name == "perm"), [])
    v = node.input[1]
    # Neither product may broadcast batches or heads, and the mask must not broadcast the scores.
    outer = [(graph.shape(name) or [])[:2] for name in (q, turned.output[0], v)]
    scored = [graph.shape(name) for name in (product.output[0], softmax.output[0])]
    if None in scored or scored[0] != scored[1] or len(scored[0] or ()) != 4 or outer != [outer[0]] * 3:
        return None
    if {graph.element(name) for name in (q, turned.output[0], v, *filter(None, [mask]))} != {_FLOAT}:
        return None
    if mask and graph.rank(mask) not in (2, 3, 4):
        return None
    parts.insert(0, turned)
    order = [*order[:2], order[3], order[2]]
    made: list[onnx.NodeProto] = []
    k = turned.input[0]
    if order != [0, 1, 2, 3]:
        k = f"{turned.output[0]}/k"
        made.append(helper.make_node("Transpose", [turned.input[0]], [k], name=k, perm=order))
    inputs = [q, k, v, *([mask] if mask else [])]
    return _Match(
        helper.make_node("Attention", inputs, node.output, scale=scale * factor / divisor), parts, made
    )


def _scaled(graph: _Graph, name: str, operator: str, parts: list[onnx.NodeProto]) -> tuple[str, float]:
    """Return a tensor and the number that it is multiplied or divided by; add that node to ``parts``."""
    product = graph.sole_producer(name, operator)
    for tensor, factor in [*_either(product)][: 1 if operator == "Div" else 2] if product is not None else ():
        scale = graph.number(factor)
        if scale and graph.rank(factor) in (0, None):
            assert product is not None
            parts.insert(0, product)
            return tensor, scale
    return name, 1.0


def _recorded(
    node: onnx.NodeProto, text: str
) -> tuple[list[onnx.NodeProto], set[str], list[onnx.ValueInfoProto]]:
    """Return the nodes that an operator replaced, the values that were made for it, and the inner values.

    Raises:
        ModelLoadError: the text is damaged.
    """
    try:
        data = json.loads(text)
        parts = [json_format.ParseDict(part, onnx.NodeProto()) for part in data["parts"]]
        made = set(map(str, data["made"]))
        values = [json_format.ParseDict(value, onnx.ValueInfoProto()) for value in data["values"]]
        if not parts or any(part.domain or part.op_type not in _PARTS for part in parts):
            raise ValueError("a node that no operator replaces")
        if [*parts[-1].output] != [*node.output] or any(name not in node.input for name in made):
            raise ValueError("another result")
    except (ValueError, TypeError, KeyError, json_format.ParseError) as error:
        raise ModelLoadError(
            f"the metadata '{COMPOSED_META}' of its node '{node.name}' is damaged ({error})"
        ) from None
    return parts, made, values


def _bare(node: onnx.NodeProto) -> onnx.NodeProto:
    """Return a copy of the node with only torch2ort's metadata."""
    made = copied(node)
    del made.metadata_props[:]
    made.metadata_props.extend(prop for prop in node.metadata_props if prop.key.startswith(_OURS))
    return made


def _copy_value(value: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    made = onnx.ValueInfoProto()
    made.CopyFrom(value)
    return made
