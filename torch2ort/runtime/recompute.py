"""Attention probabilities that backward computes anew instead of keeping them.

They are the largest values of a transformer's step and among the cheapest: a product of two tensors that are
kept anyway, a mask, and a softmax. Eager's fused attention does not keep them either. Known as selective
activation recomputation: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models,
2022, section 5.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, MutableSequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from torch2ort.runtime.nodes import ancestors, descendants

# Between the product and the softmax: scales, masks, biases.
_CHEAP = frozenset({"Add", "Cast", "Div", "Mul", "Sub", "Tanh", "Where"})
# What these read need not stay in memory.
_SIZES = frozenset({"Shape", "Size"})
# Longest rows of the product's operands: a head's size. With longer ones the product is no longer cheap.
_LONGEST_ROWS = 256
_ZERO = "recompute/zero"


def recompute_attention(gradient: onnx.GraphProto, unneeded: Collection[str], stop: Collection[str]) -> None:
    """Let backward read its own copy of each softmax over a product of activations, in place.

    Args:
        gradient: forward and backward half, sorted.
        unneeded: inputs that backward does not read, so that they may change before it: no copy does, either.
        stop: operators that are computed once, whatever is fused.
    """
    halves = _Halves(gradient)
    inserted: defaultdict[int, list[onnx.NodeProto]] = defaultdict(list)
    for softmax in gradient.node:
        if softmax.op_type != "Softmax" or softmax.output[0] in halves.fetched:
            continue
        readers = halves.readers_behind(softmax.output[0])
        triggers = [name for i in readers[:1] for name in halves.nodes[i].input if name in halves.behind]
        copy = _Copy(halves, softmax)
        if not (triggers and copy.cheap and ancestors(gradient, copy.read, stop).isdisjoint(unneeded)):
            continue
        inserted[readers[0]] += copy.nodes(triggers[0])
        for i in readers:
            _rename(halves.nodes[i].input, {softmax.output[0]: copy.name(softmax.output[0])})
    if inserted:
        nodes = [node for i, old in enumerate(halves.nodes) for node in (*inserted[i], old)]
        del gradient.node[:]
        gradient.node.extend(nodes)
        gradient.initializer.append(numpy_helper.from_array(np.array(0, np.int64), _ZERO))


class _Halves:
    """A gradient graph's values, and which nodes run behind the model's outputs."""

    def __init__(self, gradient: onnx.GraphProto) -> None:
        self.nodes = list(gradient.node)
        yields = [node for node in self.nodes if node.op_type == "YieldOp"]
        self.fetched = {name for node in yields for name in node.input}
        forward = ancestors(gradient, self.fetched)
        self.behind = descendants(gradient, (name for node in yields for name in node.output))
        self.constants = {value.name for value in (*gradient.input, *gradient.initializer)}
        self.producers = {name: node for node in self.nodes for name in node.output if name}
        self.shapes = {value.name: _shape(value) for value in (*gradient.value_info, *gradient.input)}
        self._readers: defaultdict[str, list[int]] = defaultdict(list)
        for i, node in enumerate(self.nodes):
            if node.op_type not in _SIZES | {"YieldOp"} and forward.isdisjoint(node.output):
                for name in set(node.input):
                    self._readers[name].append(i)

    def readers_behind(self, value: str) -> list[int]:
        """Positions of the nodes that read ``value`` and that the model's outputs do not need."""
        return self._readers[value]


class _Copy:
    """A second computation of one softmax, from values on that are kept anyway.

    Attributes:
        cheap: whether it takes little time, and keeps nothing in memory that is large and not kept anyway.
        read: values that it reads and that backward may not read otherwise.
    """

    def __init__(self, halves: _Halves, softmax: onnx.NodeProto) -> None:
        self._halves = halves
        self._value: str = softmax.output[0]
        self._shape = halves.shapes.get(self._value)
        self._cone: list[onnx.NodeProto] = []
        self._kept: list[str] = []
        self._products = 0
        self.read: list[str] = []
        self.cheap = self._take(softmax) and self._products <= 1 and len(self._kept) > 0

    def _take(self, node: onnx.NodeProto) -> bool:
        """Add ``node``, behind all that it needs; false if that is not cheap."""
        if node in self._cone:
            return True
        inputs = [name for name in node.input if name]
        good = self._fits(node) if node.op_type == "MatMul" else all(map(self._reach, inputs))
        self._cone.append(node)
        return good

    def _reach(self, name: str) -> bool:
        if name in self._halves.constants or self._is_smaller(name):
            self.read.append(name)
            return True
        if self._halves.readers_behind(name):
            self._kept.append(name)
            return True
        producer = self._halves.producers[name]
        return producer.op_type in _CHEAP | {"MatMul"} and self._take(producer)

    def _fits(self, product: onnx.NodeProto) -> bool:
        self._products += 1
        self._kept += product.input
        rows = (self._halves.shapes.get(product.input[0]) or (None,))[-1]
        activations = all(
            name not in self._halves.constants and self._halves.readers_behind(name) for name in product.input
        )
        return activations and isinstance(rows, int) and rows <= _LONGEST_ROWS

    def _is_smaller(self, name: str) -> bool:
        """Whether ``name`` is surely broadcast to the softmax's shape."""
        shape, full = self._halves.shapes.get(name), self._shape
        if shape is None or full is None or len(shape) > len(full):
            return False
        aligned = zip(reversed(shape), reversed(full), strict=False)
        return len(shape) < len(full) or any(size == 1 != whole for size, whole in aligned)

    def name(self, value: str) -> str:
        """Name of the copy of one of its values."""
        return f"{value}/again/{self._value}"

    def nodes(self, trigger: str) -> list[onnx.NodeProto]:
        """Nodes of the copy.

        Args:
            trigger: a value of the backward half without which nobody needs the copy. A value that the copy
                is made of is reshaped to a shape that depends on it, so that the copy is not made before,
                and not taken for the original.
        """
        operand = self._kept[0]
        size, nothing, shape, sizes = (self.name(f"{operand}/{i}") for i in range(4))
        waiting = [
            helper.make_node("Size", [trigger], [size]),
            helper.make_node("Mul", [size, _ZERO], [nothing]),
            helper.make_node("Shape", [operand], [shape]),
            helper.make_node("Add", [shape, nothing], [sizes]),
            helper.make_node("Reshape", [operand, sizes], [self.name(operand)], allowzero=1),
        ]
        made = {name: self.name(name) for node in self._cone for name in node.output}
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in self._cone]
        for node in copies:
            node.name = self.name(node.name)
            _rename(node.input, {**made, operand: self.name(operand)})
            _rename(node.output, made)
        return [*waiting, *copies]


def _rename(values: MutableSequence[str], names: Mapping[str, str]) -> None:
    values[:] = [names.get(value, value) for value in values]


def _shape(value: onnx.ValueInfoProto) -> tuple[int | str, ...] | None:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return tuple(d.dim_value if d.HasField("dim_value") else d.dim_param for d in tensor.shape.dim)
