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
from torch2ort.kernels.library import LibraryKernel
from torch2ort.pythonop import Site

FLOATS = {
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.DOUBLE,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
}

# Their derivatives only move or add up what they get.
_MOVES = frozenset(
    {
        "Add",
        "Cast",
        "Concat",
        "Expand",
        "Flatten",
        "Gather",
        "Identity",
        "Neg",
        "ReduceSum",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "Sub",
        "Transpose",
        "Unsqueeze",
    }
)
# More sets of missing gradients than these are not remembered at once; most models give one.
_MOST_SETS = 256
Edge = tuple[str, int]  # a PythonOp node's name and the position of an argument of its Function


class Reach:
    """Differentiable paths of a graph.

    Args:
        graph: the exported graph, before the gradient graph is built.
    """

    def __init__(self, graph: Graph) -> None:
        self._sites = graph.sites
        proto = graph.proto.graph
        self._functions = {node.name: node for node in proto.node if node.name in graph.sites}
        self._outputs = tuple(graph.outputs)
        self._producers = {name: node for node in proto.node for name in node.output if name}
        values = (*proto.input, *proto.value_info, *proto.output)
        self._types = {value.name: value.type.tensor_type.elem_type for value in values}
        self._feeds = set(graph.feeds)
        self._cache: dict[tuple[tuple[str, ...], frozenset[Edge]], frozenset[tuple[str, bool]]] = {}

    def inputs(self, outputs: Iterable[str], undefined: Iterable[Edge] = ()) -> frozenset[str]:
        """Graph inputs that a gradient of ``outputs`` reaches.

        Args:
            outputs: names of graph outputs that have a gradient.
            undefined: arguments for which a Function's backward returned ``None`` in this run.
        """
        seen = self._seen(outputs, undefined)
        return frozenset(name for name in self._feeds if (name, True) in seen)

    def arrivals(
        self, node: str, outputs: Iterable[str], undefined: Iterable[Edge] = ()
    ) -> tuple[bool, ...] | None:
        """Which gradients autograd gives to a Function.

        Args:
            node: name of its PythonOp node.
            outputs: names of graph outputs that have a gradient.
            undefined: arguments for which the Functions whose backward ran before returned ``None``.

        Returns:
            One truth value per tensor that forward returned; ``()`` if its backward does not run at all,
            ``None`` if there is nothing to say.
        """
        if node not in self._functions:
            return None
        seen = self._seen(outputs, undefined)
        # The first output is the context.
        results = self._functions[node].output[1:]
        if not any((name, defined) in seen for name in results for defined in (True, False)):
            return ()
        arrived = tuple((name, True) in seen for name in results)
        # An operator of PyTorch's passes on that there is nothing.
        return () if _passes_nothing_on(self._sites[node]) and not any(arrived) else arrived

    def is_whole(self, outputs: Iterable[str]) -> bool:
        """Whether every Function gets every gradient from ``outputs`` that it would get from all of them."""
        return all(
            self.arrivals(node, outputs) == self.arrivals(node, self._outputs) for node in self._functions
        )

    def makes_zeros_felt(self, outputs: Iterable[str]) -> bool:
        """Whether zeros for the other outputs' gradients go through operators that can make NaN of them."""
        outputs = tuple(outputs)
        reached = {name for name, defined in self._seen(outputs, ()) if defined}
        stack = [name for name, _ in self._seen(self._outputs, ()) if name in self._outputs]
        walked = set(reached)
        while stack:
            name = stack.pop()
            node = self._producers.get(name)
            if name in walked or node is None:
                continue
            walked.add(name)
            if node.op_type == "StopGradient":
                continue
            if node.op_type not in _MOVES and node.name not in self._functions:
                return True
            stack += [value for value in node.input if value]
        return False

    def _seen(self, outputs: Iterable[str], undefined: Iterable[Edge]) -> frozenset[tuple[str, bool]]:
        key = tuple(outputs), frozenset(undefined)
        found = self._cache.get(key)
        if found is None:
            if len(self._cache) >= _MOST_SETS:
                self._cache.clear()
            found = self._cache[key] = frozenset(self._walk(*key))
        return found

    def _walk(self, outputs: tuple[str, ...], undefined: frozenset[Edge]) -> set[tuple[str, bool]]:
        """Values to which autograd's nodes give gradients: with ``True`` numbers, with ``False`` none."""
        left_out: defaultdict[str, set[int]] = defaultdict(set)
        for node_name, position in undefined:
            left_out[node_name].add(position)
        # Autograd runs every node behind an output, also one to which no gradient arrives.
        seen: set[tuple[str, bool]] = set()
        stack = [(output, True) for output in outputs]
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
                # A Function's backward is called all the same, and what it returned for is left out.
                passed = defined or not _passes_nothing_on(site)
                missing = left_out.get(node.name, set())
                stack.extend(
                    (value, passed and p not in missing)
                    for value, p in zip(node.input, site.tensor_positions, strict=True)
                    if site.needs_input_grad[p]
                )
        return seen


def _passes_nothing_on(site: Site) -> bool:
    """Whether a call's derivative is not run where no gradient arrives, as those of PyTorch's kernels."""
    return site.internal and site.function is not LibraryKernel


def _differentiable(node: onnx.NodeProto, site: Site, output: str) -> bool:
    # The outputs of a PythonOp node are its context and then the tensors.
    position = list(node.output).index(output) - 1
    return position >= 0 and position not in site.known_result.non_differentiable
