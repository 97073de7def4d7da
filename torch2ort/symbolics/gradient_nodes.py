"""Which nodes of a translated graph a gradient goes through."""

from __future__ import annotations

import onnx_ir as ir


def gradient_nodes(model: ir.Model, trained: frozenset[str]) -> list[tuple[ir.Node, frozenset[int]]]:
    """Nodes through which a gradient goes, each with the positions of the inputs that carry it."""
    graph = model.graph
    carrying = {v for v in (*graph.inputs, *graph.initializers.values()) if v.name in trained}
    found: list[tuple[ir.Node, frozenset[int]]] = []
    for node in graph:
        inputs = frozenset(i for i, v in enumerate(node.inputs) if v in carrying)
        outputs = [v for v in node.outputs if v.dtype is None or v.dtype.is_floating_point()]
        if inputs and outputs:
            found.append((node, inputs))
            carrying.update(outputs)
    # Only what also reaches an output is differentiated.
    wanted = set(graph.outputs)
    reaching: list[tuple[ir.Node, frozenset[int]]] = []
    for node, inputs in reversed(found):
        if any(v in wanted for v in node.outputs):
            wanted.update(v for v in node.inputs if v is not None)
            reaching.append((node, inputs))
    return reaching[::-1]
