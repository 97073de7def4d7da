"""Feeds that a session owns, so that each is free after its last reader, and not when the run ends.

Known as buffer donation. The runtime keeps whatever it is fed with until the run ends. A node without inputs
that hands over the same value makes it one of the run's own, which is free as soon as nobody reads it any
more and may be written over.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx

_DOMAIN = "com.microsoft"


def donate_inputs(graph: onnx.GraphProto, names: Sequence[str]) -> None:
    """Have nodes hand over inputs of a graph, in place.

    Args:
        graph: as it will run: no size of these inputs is known any more.
        names: of the inputs; the first is the first value that the run was given, and so on. What nobody
            reads gets no node.
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
