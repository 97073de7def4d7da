"""Which inputs get a gradient from which outputs.

Autograd gives ``None``, not zeros, to a tensor that no differentiable path joins to the loss, and
optimisers tell the two apart (weight decay, momentum). ONNX Runtime's gradient graph is built once for
all outputs and always computes numbers, so the difference is found here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import onnx

from torch2ort.graph.graph import Graph
from torch2ort.pythonop import Site

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
        self._cache: dict[tuple[str, frozenset[Edge], frozenset[str]], frozenset[str]] = {}

    def inputs(
        self, outputs: Iterable[str], undefined: Iterable[Edge] = (), unmaterialized: Iterable[str] = ()
    ) -> frozenset[str]:
        """Graph inputs that a gradient of ``outputs`` reaches.

        Args:
            outputs: names of graph outputs that have a gradient.
            undefined: arguments for which a Function's backward returned ``None`` in this run.
            unmaterialized: PythonOp nodes whose Function takes a missing gradient as ``None``; what it then
                returns counts as missing, too. The others take zeros, as they do in eager PyTorch.
        """
        given = frozenset(undefined), frozenset(unmaterialized)
        return frozenset().union(*(self._from(output, *given) for output in outputs))

    def _from(
        self, output: str, undefined: frozenset[Edge], unmaterialized: frozenset[str]
    ) -> frozenset[str]:
        key = (output, undefined, unmaterialized)
        if key not in self._cache:
            self._cache[key] = frozenset(self._walk(*key))
        return self._cache[key]

    def _walk(self, output: str, undefined: frozenset[Edge], unmaterialized: frozenset[str]) -> set[str]:
        left_out: defaultdict[str, set[int]] = defaultdict(set)
        for node_name, position in undefined:
            left_out[node_name].add(position)
        # Autograd runs every node behind an output, also one to which no gradient arrives.
        seen: set[tuple[str, bool]] = set()
        stack = [(output, True)]
        while stack:
            name, defined = stack.pop()
            if (name, defined) in seen or self._types.get(name, onnx.TensorProto.FLOAT) not in FLOATS:
                continue
            seen.add((name, defined))
            node = self._producers.get(name)
            if node is None or node.op_type == "StopGradient":
                continue
            site = self._sites.get(node.name)
            if site is None:
                stack.extend((value, defined) for value in node.input if value)
            elif _differentiable(node, site, name):
                passed = defined or (not site.internal and (site.mapped or node.name not in unmaterialized))
                missing = left_out.get(node.name, set())
                stack.extend(
                    (value, passed and p not in missing)
                    for value, p in zip(node.input, site.tensor_positions, strict=True)
                    if site.needs_input_grad[p]
                )
        return {name for name in self._feeds if (name, True) in seen}


def _differentiable(node: onnx.NodeProto, site: Site, output: str) -> bool:
    # The outputs of a PythonOp node are its context and then the tensors.
    position = list(node.output).index(output) - 1
    return position >= 0 and position not in site.known_result.non_differentiable
