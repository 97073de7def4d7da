"""Activations that backward computes anew instead of keeping them.

Attention probabilities are the largest values of a transformer's step and among the cheapest: a product of
two tensors that are kept anyway, a mask, and a softmax. Eager's fused attention does not keep them either.
What a GELU or a normalisation returns, which the next layer's weight gradient reads, takes a few operations
an element from what its own backward keeps. Known as selective activation recomputation: Korthikanti et al.,
Reducing Activation Recomputation in Large Transformer Models, 2022, section 5.

Eager's backward reads the activation, whatever became of the tensors behind it, and writes by ``.data`` or
NumPy leave no mark. So nothing is computed from a feed or an output as it is by then: weights, which are
small beside an activation, are fed a second time, as copies.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

from torch2ort.engines.held_memory import arguments_at
from torch2ort.graph.nodes import ancestors, descendants
from torch2ort.graph.operator_memory import SIZES, memory_of
from torch2ort.kernels.repeatable import repeatable
from torch2ort.pythonop import Site
from torch2ort.runtime.centering import centered

# Between the product and the softmax: scales, masks, biases.
_CHEAP = frozenset({"Add", "Cast", "Div", "Mul", "Sub", "Tanh", "Where"})
# Longest rows of the product's operands: a head's size. With longer ones the product is no longer cheap.
_LONGEST_ROWS = 256
_ZERO = "recompute/zero"


def recompute_activations(
    gradient: onnx.GraphProto,
    sites: Mapping[str, Site],
    unneeded: Collection[str],
    stop: Collection[str],
    copyable: Collection[str],
) -> dict[str, str]:
    """Let backward read its own copy of what is cheap to compute from values that are kept anyway, in place.

    That is a softmax over a product of activations, and the result of a kernel that is cheap to repeat (see
    torch2ort.kernels.repeatable).

    Args:
        gradient: forward and backward half, sorted.
        sites: the site of each PythonOp node, by the node's name.
        unneeded: inputs that backward does not read, so that they may change before it: no copy does, either.
        stop: operators that are computed once, whatever is fused.
        copyable: inputs that can be fed a second time.

    Returns:
        New inputs of the graph -> what each is fed with a copy of.
    """
    halves = _Halves(gradient, sites)
    changeable = descendants(gradient, unneeded, {*stop, *SIZES})
    # A softmax's copy starts from values that are kept for it, so the kernels come second.
    cones = itertools.chain(
        (_cone_of_softmax(node, halves) for node in halves.nodes if node.op_type == "Softmax"),
        (_cone_of_kernel(node, halves, sites[node.name]) for node in halves.nodes if node.name in sites),
    )
    inserted: defaultdict[int, list[onnx.NodeProto]] = defaultdict(list)
    copies: dict[str, str] = {}
    for cone in cones:
        copy = None if cone is None else _Copy.of(cone, halves)
        if copy is None or not changeable.isdisjoint(copy.read):
            continue
        exposed = halves.exposed([*copy.cone.kept, *copy.read])
        # What reads a feed in another shape does not read it by its name.
        if not exposed <= {*copyable} & {*copy.read}:
            continue
        fed = {name: f"{name}/copy" for name in exposed}
        copies.update({copied: name for name, copied in fed.items()})
        inserted[copy.readers[0]] += copy.nodes(fed)
        halves.held.update(copy.cone.kept)
        for i in copy.readers:
            _rename(halves.nodes[i].input, {value: copy.name(value) for value in copy.values})
    if inserted:
        nodes = [node for i, old in enumerate(halves.nodes) for node in (*inserted[i], old)]
        del gradient.node[:]
        gradient.node.extend(nodes)
        gradient.initializer.append(numpy_helper.from_array(np.array(0, np.int64), _ZERO))
    inputs = {value.name: value for value in gradient.input}
    for name, source in copies.items():
        gradient.input.append(inputs[source])
        gradient.input[-1].name = name
    return copies


class _Halves:
    """A gradient graph's values, and which nodes run behind the model's outputs.

    Attributes:
        nodes: all, sorted.
        behind: values that depend on the gradients of the model's outputs.
        held: values that are in memory until backward whatever it reads.
        constants: inputs and initialisers.
        producers: the node that computes a value.
        shapes: of the values whose shape is known.
    """

    def __init__(self, gradient: onnx.GraphProto, sites: Mapping[str, Site]) -> None:
        self.nodes = list(gradient.node)
        yields = [node for node in self.nodes if node.op_type == "YieldOp"]
        fetched = {name for node in yields for name in node.input}
        self._forward = ancestors(gradient, fetched)
        self.behind = descendants(gradient, (name for node in yields for name in node.output))
        self.held = set(fetched)
        for node in self.nodes:
            if node.op_type == "PythonOp" and node.name in sites:
                self.held.update(arguments_at(node, sites[node.name], sites[node.name].known_result.kept))
        self.constants = {value.name for value in (*gradient.input, *gradient.initializer)}
        self.producers = {name: node for node in self.nodes for name in node.output if name}
        self._exposed = {*map(self._owner, fetched), *(value.name for value in gradient.input)}
        self.shapes = {value.name: _shape(value) for value in (*gradient.value_info, *gradient.input)}
        self._positions = {name: i for i, node in enumerate(self.nodes) for name in node.output}
        self._readers: defaultdict[str, list[int]] = defaultdict(list)
        for i, node in enumerate(self.nodes):
            if node.op_type not in SIZES | {"YieldOp"} and self._forward.isdisjoint(node.output):
                for name in set(node.input):
                    self._readers[name].append(i)

    def exposed(self, values: Iterable[str]) -> set[str]:
        """The feeds and the model's outputs whose memory some values may be."""
        return set(map(self._owner, values)) & self._exposed

    def _owner(self, value: str) -> str:
        """The value whose memory another may be."""
        producer = self.producers.get(value)
        while producer is not None and _may_pass_on(producer.op_type):
            value = producer.input[0]
            producer = self.producers.get(value)
        return value

    def readers_behind(self, value: str) -> list[int]:
        """Positions of the nodes that read ``value`` and that the model's outputs do not need."""
        return self._readers[value]

    def views_of(self, value: str) -> list[onnx.NodeProto]:
        """The nodes that pass ``value`` on to the model's outputs with another shape."""
        return [
            node
            for node in self.nodes
            if memory_of(node.op_type).reshapes and node.input[0] == value and node.output[0] in self._forward
        ]

    def trigger(self, reader: int) -> str | None:
        """A value of the backward half, computed before node ``reader``, that meets what it reads."""
        made = set(self.nodes[reader].output)
        for i, node in enumerate(self.nodes[reader:], reader):
            if i > reader and made.isdisjoint(node.input):
                continue
            behind = [name for name in node.input if name in self.behind]
            if behind:
                return next((name for name in behind if self._positions[name] < reader), None)
            made.update(node.output)
        return None


@dataclass(frozen=True, slots=True)
class _Cone:
    """How a value is computed from values that are kept anyway.

    Attributes:
        value: what is computed.
        nodes: sorted.
        kept: the values that are kept anyway, an activation first.
        read: further values that the nodes read, and that backward may not read otherwise.
    """

    value: str
    nodes: Sequence[onnx.NodeProto]
    kept: Sequence[str]
    read: Sequence[str]


def _cone_of_kernel(node: onnx.NodeProto, halves: _Halves, site: Site) -> _Cone | None:
    operator = repeatable(site)
    context, *results = node.output
    # Without a backward of its own, nobody keeps the kernel's arguments.
    if operator is None or not halves.readers_behind(context):
        return None
    again = helper.make_node(
        operator.name, node.input, results, node.name, domain=operator.domain, **operator.attributes
    )
    nodes = [again]
    if operator.name == "LayerNormalization":
        shape = halves.shapes.get(node.input[0])
        nodes = centered(again, None if shape is None else len(shape))
    return _Cone(results[0], nodes, node.input[:1], node.input[1:])


def _cone_of_softmax(node: onnx.NodeProto, halves: _Halves) -> _Cone | None:
    search = _Search(halves, node.output[0])
    return search.cone() if search.take(node) else None


class _Search:
    """Looks for a cone that takes little time and keeps nothing large in memory that is not kept anyway."""

    def __init__(self, halves: _Halves, value: str) -> None:
        self._halves = halves
        self._value = value
        self._shape = halves.shapes.get(value)
        self._nodes: list[onnx.NodeProto] = []
        self._kept: list[str] = []
        self._read: list[str] = []
        self._products = 0

    def cone(self) -> _Cone | None:
        """What was taken, if it is one product or less and starts from something."""
        if self._products > 1 or not self._kept:
            return None
        return _Cone(self._value, self._nodes, self._kept, self._read)

    def take(self, node: onnx.NodeProto) -> bool:
        """Add ``node``, behind all that it needs; false if that is not cheap."""
        if node in self._nodes:
            return True
        inputs = [name for name in node.input if name]
        good = self._fits(node) if node.op_type == "MatMul" else all(map(self._reach, inputs))
        self._nodes.append(node)
        return good

    def _reach(self, name: str) -> bool:
        if name in self._halves.constants or self._is_smaller(name):
            self._read.append(name)
            return True
        if self._halves.readers_behind(name):
            self._kept.append(name)
            return True
        producer = self._halves.producers[name]
        return producer.op_type in _CHEAP | {"MatMul"} and self.take(producer)

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


@dataclass(frozen=True, slots=True)
class _Copy:
    """A second computation of a value, for the nodes behind the outputs that read it or a view of it.

    Attributes:
        cone: how it is computed.
        views: nodes that give it other shapes.
        readers: positions of the nodes that shall read the copy, sorted.
        trigger: a value of the backward half without which nobody needs the copy.
    """

    cone: _Cone
    views: Sequence[onnx.NodeProto]
    readers: Sequence[int]
    trigger: str

    @classmethod
    def of(cls, cone: _Cone, halves: _Halves) -> _Copy | None:
        """The copy that saves memory, or ``None``: the value is held, or nobody needs it behind."""
        views = halves.views_of(cone.value)
        values = [cone.value, *(view.output[0] for view in views)]
        readers = sorted({i for value in values for i in halves.readers_behind(value)})
        trigger = halves.trigger(readers[0]) if readers and halves.held.isdisjoint(values) else None
        if trigger is None:
            return None
        return cls(cone, [v for v in views if halves.readers_behind(v.output[0])], readers, trigger)

    @property
    def values(self) -> list[str]:
        """The value and its views."""
        return [self.cone.value, *(view.output[0] for view in self.views)]

    @property
    def read(self) -> list[str]:
        """Values that it reads and that backward may not read otherwise."""
        return [*self.cone.read, *(name for view in self.views for name in view.input[1:])]

    def name(self, value: str) -> str:
        """Name of the copy of one of its values."""
        return f"{value}/again/{self.cone.value}"

    def nodes(self, fed: Mapping[str, str]) -> list[onnx.NodeProto]:
        """Nodes of the copy, which read inputs by the names of ``fed``.

        What it starts from is reshaped to a shape that depends on the trigger, so that the copy is not made
        before, and not taken for the original.
        """
        operand = self.cone.kept[0]
        size, nothing, shape, sizes = (self.name(f"{operand}/{i}") for i in range(4))
        waiting = [
            helper.make_node("Size", [self.trigger], [size]),
            helper.make_node("Mul", [size, _ZERO], [nothing]),
            helper.make_node("Shape", [operand], [shape]),
            helper.make_node("Add", [shape, nothing], [sizes]),
            helper.make_node("Reshape", [operand, sizes], [self.name(operand)], allowzero=1),
        ]
        copied = (*self.cone.nodes, *self.views)
        made = {name: self.name(name) for node in copied for name in node.output}
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in copied]
        for node in copies:
            node.name = self.name(node.name)
            _rename(node.input, {**fed, **made, operand: self.name(operand)})
            _rename(node.output, made)
        return [*waiting, *copies]


def _may_pass_on(operator: str) -> bool:
    memory = memory_of(operator)
    return memory.passes_on or memory.may_vanish


def _rename(values: MutableSequence[str], names: Mapping[str, str]) -> None:
    values[:] = [names.get(value, value) for value in values]


def _shape(value: onnx.ValueInfoProto) -> tuple[int | str, ...] | None:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return tuple(d.dim_value if d.HasField("dim_value") else d.dim_param for d in tensor.shape.dim)
