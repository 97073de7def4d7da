"""Inputs that a run owns, so each is free after its last use instead of at the end of the run.

This is known as buffer donation. ONNX Runtime keeps all inputs of a run until its end. A node without inputs
that returns such a value makes it a value of the run's own. Its memory is free, and may be reused, after its
last use.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx

_DOMAIN = "com.microsoft"


def donate_inputs(graph: onnx.GraphProto, names: Sequence[str]) -> None:
    """Replace inputs of a graph by nodes that return the values, in place.

    Args:
        graph: the optimised graph, in which the sizes of these inputs are no longer known.
        names: the inputs; the first is the first value that is donated to the run, and so on. Unused ones get
            no node.
    """
    inputs = {value.name: value for value in graph.input}
    read = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    made = [_donated(inputs[name], i) for i, name in enumerate(names) if name in read]
    given = [value for value in graph.input if value.name not in names]
    nodes = list(graph.node)
    del graph.input[:], graph.node[:]
    graph.input.extend(given)
    graph.node.extend([*made, *nodes])


def _donated(value: onnx.ValueInfoProto, index: int) -> onnx.NodeProto:
    kind = value.type.tensor_type
    return onnx.helper.make_node(
        "Donated",
        [],
        [value.name],
        f"Donated_{value.name}",
        domain=_DOMAIN,
        index=[index],
        output_tensor_types=[kind.elem_type],
        output_tensor_ranks=[len(kind.shape.dim)],
    )
