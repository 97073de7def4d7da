"""Renaming of a graph's values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import onnx

from torch2ort.graph.accepted_sizes import Sizes
from torch2ort.graph.graph import Graph
from torch2ort.graph.interface import Interface


def rename_values(graph: Graph, interface: Interface, names: Mapping[str, str]) -> tuple[Graph, Interface]:
    """Return a graph and its interface with other names of some values.

    Args:
        graph: it is not changed.
        interface: the graph's interface.
        names: old name -> new name. A value that already has one of the new names, and is not renamed itself,
            gets another name.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(graph.proto)
    used = {value for node in proto.graph.node for value in (*node.input, *node.output)}
    used |= {value.name for value in (*proto.graph.input, *proto.graph.output, *proto.graph.initializer)}
    taken = (set(names.values()) & used) - names.keys()
    whole = {**{name: _free(name, used | set(names.values())) for name in taken}, **names}
    _rename(proto.graph, whole)

    def new(name: str) -> str:
        return whole.get(name, name)

    inputs = tuple(map(new, graph.inputs))
    result = replace(
        graph,
        proto=proto,
        inputs=inputs,
        weights={new(name): origin for name, origin in graph.weights.items()},
        outputs=tuple(map(new, graph.outputs)),
        mutations=tuple(
            replace(m, output=new(m.output), target=new(m.target) if m.kind == "input" else m.target)
            for m in graph.mutations
        ),
    )
    sizes = interface.sizes
    return result, replace(
        interface, sizes=Sizes(inputs, sizes.dims, sizes.ranges, sizes.guards, sizes.lines)
    )


def _free(name: str, taken: set[str]) -> str:
    """Return an unused name like this one."""
    while name in taken:
        name += "_"
    return name


def _rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Rename values, also in subgraphs."""
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        for field in (node.input, node.output):
            field[:] = [names.get(value, value) for value in field]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _rename(attribute.g, names)
