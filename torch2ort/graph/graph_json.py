"""The JSON form of a graph's signature and interface, without its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx

from torch2ort import io_schema
from torch2ort.errors import ModelLoadError
from torch2ort.graph.accepted_sizes import Sizes
from torch2ort.graph.graph import Graph, GraphSignature
from torch2ort.graph.interface import Interface
from torch2ort.graph.mutation import Mutation
from torch2ort.pythonop import Site


def record(graph: GraphSignature, interface: Interface) -> dict[str, Any]:
    """Return both as plain values for JSON, without the interface's signature and schemas."""
    sizes = interface.sizes
    return {
        "dims": [list(d) for d in sizes.dims],
        "ranges": {name: list(bounds) for name, bounds in sizes.ranges.items()},
        "guards": list(sizes.guards),
        "returned": [list(pair) for pair in interface.returned],
        "same": list(interface.same),
        "graph_inputs": list(graph.inputs),
        "graph_outputs": list(graph.outputs),
        "mutations": [[m.output, m.kind, m.target] for m in graph.mutations],
        "portable": graph.portable,
    }


def recorded_graph(
    data: Mapping[str, Any], proto: onnx.ModelProto, sites: dict[str, Site], weights: Mapping[str, str]
) -> Graph:
    """Return the graph that :func:`record` recorded.

    Args:
        data: the record.
        proto: the nodes.
        sites: by the names of the nodes.
        weights: graph input -> name of the weight that is fed to it.

    Raises:
        KeyError: an entry is missing.
    """
    return Graph(**vars(recorded_signature(data, weights)), proto=proto, sites=sites)


def recorded_signature(data: Mapping[str, Any], weights: Mapping[str, str]) -> GraphSignature:
    """Return the names that :func:`record` recorded.

    Raises:
        KeyError: an entry is missing.
    """
    return GraphSignature(
        inputs=tuple(data["graph_inputs"]),
        weights=dict(weights),
        outputs=tuple(data["graph_outputs"]),
        mutations=tuple(Mutation(*entry) for entry in data["mutations"]),
        portable=bool(data.get("portable", False)),
    )


def recorded_interface(
    data: Mapping[str, Any],
    signature: io_schema.Signature,
    inputs: io_schema.Schema,
    outputs: io_schema.Schema,
) -> Interface:
    """Return the interface that :func:`record` recorded.

    Raises:
        KeyError: an entry is missing.
        ModelLoadError: a condition on sizes or a position of an input is invalid.
    """
    ranges = {name: (low, high) for name, (low, high) in data["ranges"].items()}
    sizes = Sizes(tuple(data["graph_inputs"]), data["dims"], ranges, data["guards"])
    returned = tuple((int(output), int(given)) for output, given in data.get("returned", ()))
    same = tuple(map(int, data.get("same", ())))
    if same and (len(same) != len(inputs.leaves) or any(not 0 <= j <= i for i, j in enumerate(same))):
        raise ModelLoadError(f"its positions of identical inputs, {same}, are invalid")
    return Interface(signature, inputs, outputs, sizes, returned, same)
