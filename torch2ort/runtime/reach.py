"""Which inputs get a gradient from which outputs.

Autograd gives ``None``, not zeros, to a tensor that no differentiable path joins to the loss, and
optimisers tell the two apart (weight decay, momentum). ONNX Runtime's gradient graph is built once for
all outputs and always computes numbers, so the difference is found here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import onnx

from torch2ort.pythonop import TENSOR, Site
from torch2ort.runtime.graph import Graph

FLOATS = {
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.DOUBLE,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
}

# Input positions through which no gradient flows, although the values are floats.
_BLOCKED = {
    "Shape": {0}, "Size": {0}, "StopGradient": {0}, "Dropout": {1}, "Clip": {1, 2}, "ConstantOfShape": {0},
    "BatchNormalization": {3, 4}, "Resize": {1, 2}, "Pad": {2}, "Range": {0, 1, 2}, "OneHot": {0, 1, 2},
    "Sign": {0}, "Floor": {0}, "Ceil": {0}, "Round": {0}, "ArgMax": {0}, "ArgMin": {0}, "IsNaN": {0}, "IsInf": {0},
    "Equal": {0, 1}, "Less": {0, 1}, "LessOrEqual": {0, 1}, "Greater": {0, 1}, "GreaterOrEqual": {0, 1},
    "NonZero": {0}, "Not": {0}, "And": {0, 1}, "Or": {0, 1}, "RandomNormalLike": {0}, "RandomUniformLike": {0},
    "Bernoulli": {0},
}  # fmt: skip

Edge = tuple[str, int]  # a PythonOp node's name and the position of an argument of its Function


class Reach:
    """Differentiable paths of a graph.

    Args:
        graph: the exported graph, before the gradient graph is built.
    """

    def __init__(self, graph: Graph) -> None:
        self._sites = graph.sites
        self._producers = {name: node for node in graph.proto.graph.node for name in node.output if name}
        self._feeds = set(graph.feeds)
        self._cache: dict[tuple[frozenset[str], frozenset[Edge]], frozenset[str]] = {}

    def inputs(self, outputs: Iterable[str], undefined: Iterable[Edge] = ()) -> frozenset[str]:
        """Graph inputs that a gradient of ``outputs`` reaches.

        Args:
            outputs: names of graph outputs that have a gradient.
            undefined: arguments for which a Function's backward returned ``None`` in this run.
        """
        key = (frozenset(outputs), frozenset(undefined))
        if key not in self._cache:
            self._cache[key] = frozenset(self._walk(*key))
        return self._cache[key]

    def _walk(self, outputs: frozenset[str], undefined: frozenset[Edge]) -> set[str]:
        blocked: defaultdict[str, set[int]] = defaultdict(set)
        for node_name, position in undefined:
            blocked[node_name].add(position)
        seen: set[str] = set()
        stack = list(outputs)
        while stack:
            name = stack.pop()
            if name in seen:
                continue
            seen.add(name)
            node = self._producers.get(name)
            if node is not None:
                stack.extend(self._upstream(node, name, blocked.get(node.name, set())))
        return seen & self._feeds

    def _upstream(self, node: onnx.NodeProto, output: str, undefined: set[int]) -> list[str]:
        site = self._sites.get(node.name)
        if site is not None:
            return _through_site(site, node, output, undefined)
        if node.op_type == "Cast":
            to = next(a.i for a in node.attribute if a.name == "to")
            return [node.input[0]] if to in FLOATS else []
        blocked = _BLOCKED.get(node.op_type, set())
        return [name for i, name in enumerate(node.input) if name and i not in blocked]


def _through_site(site: Site, node: onnx.NodeProto, output: str, undefined: set[int]) -> list[str]:
    # The outputs of a PythonOp node are its context and then the tensors.
    position = list(node.output).index(output) - 1
    if position < 0 or position in site.known_result.non_differentiable:
        return []
    arguments = [p for p, a in enumerate(site.arguments) if a is TENSOR]
    return [
        name
        for name, p in zip(node.input, arguments, strict=True)
        if site.needs_input_grad[p] and p not in undefined
    ]
