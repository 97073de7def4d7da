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

Edge = tuple[str, int]  # a PythonOp node's name and the position of an argument of its Function


class Reach:
    """Differentiable paths of a graph.

    Args:
        graph: the exported graph, before the gradient graph is built.
    """

    def __init__(self, graph: Graph) -> None:
        self._sites = graph.sites
        proto = graph.proto.graph
        self._producers = {name: node for node in proto.node for name in node.output if name}
        values = (*proto.input, *proto.value_info, *proto.output)
        self._types = {value.name: value.type.tensor_type.elem_type for value in values}
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
            if name in seen or self._types.get(name, onnx.TensorProto.FLOAT) not in FLOATS:
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
        return [] if node.op_type == "StopGradient" else [name for name in node.input if name]


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
