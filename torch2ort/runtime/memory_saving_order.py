"""An order of nodes that frees memory early."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx

from torch2ort.graph.graph_traversal import bodies, values_read


def free_early(graph: onnx.GraphProto) -> None:
    """Sort the nodes of a graph so that each output is computed as early as possible, in place.

    The output that needs the fewest nodes is computed first, and each node just before its first consumer. In
    a backward graph, a weight's gradient then follows the gradient that it is computed from, which is free
    afterwards, and recomputed values are computed just before their use. In ONNX Runtime's own order, the
    gradients of weights come last, so all that they read lives until then.

    Args:
        graph: sorted topologically.
    """
    nodes = list(graph.node)
    makers = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    read = [list(dict.fromkeys(makers[name] for name in _inputs(node) if name in makers)) for node in nodes]
    # For each node, the nodes that it depends on, as the bits of a number.
    needed: list[int] = []
    for i, made_by in enumerate(read):
        bits = 1 << i
        for maker in made_by:
            bits |= needed[maker]
        needed.append(bits)
    costs = [bits.bit_count() for bits in needed]
    for made_by in read:
        # The most expensive operand first: cheap ones then live for a short time.
        made_by.sort(key=lambda i: -costs[i])
    results = {makers[value.name] for value in graph.output if value.name in makers}
    wanted = [*sorted(results, key=costs.__getitem__), *range(len(nodes))]
    order = list(_depth_first(wanted, read))
    sorted_nodes = [onnx.NodeProto.FromString(nodes[i].SerializeToString()) for i in order]
    del graph.node[:]
    graph.node.extend(sorted_nodes)


def _inputs(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names that a node reads, including those in its bodies."""
    yield from node.input
    for body in bodies(node):
        yield from values_read(body)


def _depth_first(wanted: Sequence[int], read: Sequence[Sequence[int]]) -> Iterator[int]:
    """Yield each node after those that it reads."""
    done: set[int] = set()
    for first in wanted:
        stack = [(first, iter(read[first]))]
        while stack:
            node, left = stack[-1]
            following = next((i for i in left if i not in done), None)
            if node not in done and following is not None:
                stack.append((following, iter(read[following])))
                continue
            stack.pop()
            if node not in done:
                done.add(node)
                yield node
