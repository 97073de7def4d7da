"""The graph that engines run: an exported model without its weights."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import onnx

from torch2ort.graph.mutation import Mutation
from torch2ort.pythonop import Site

__all__ = ["Graph", "GraphSignature", "Mutation", "with_outputs"]


@dataclass(frozen=True)
class GraphSignature:
    """Names of the inputs and outputs of an exported graph.

    Attributes:
        inputs: names of the model's tensor inputs.
        weights: graph input -> name of the parameter, buffer or constant that is fed to it.
        outputs: names of the model's tensor outputs.
        mutations: writes to buffers and inputs.
        portable: whether calls of Functions have their bodies in the graph (graph/function_calls.py).
    """

    inputs: tuple[str, ...]
    weights: dict[str, str]
    outputs: tuple[str, ...]
    mutations: tuple[Mutation, ...]
    portable: bool = field(default=False, kw_only=True)

    @property
    def feeds(self) -> tuple[str, ...]:
        """Every graph input, in order."""
        return (*self.inputs, *self.weights)

    @property
    def fetches(self) -> tuple[str, ...]:
        """Every graph output, in order."""
        return (*self.outputs, *(m.output for m in self.mutations))


@dataclass(frozen=True)
class Graph(GraphSignature):
    """An exported graph whose weights are graph inputs, with everything that a session needs.

    Attributes:
        proto: inputs are :attr:`inputs`, then the keys of :attr:`weights`; outputs are
            :attr:`outputs`, then those of :attr:`mutations`.
        sites: the site of each PythonOp node, by node name.
    """

    proto: onnx.ModelProto
    sites: dict[str, Site]

    @property
    def uses_rng(self) -> bool:
        """True if a run draws from PyTorch's random generator."""
        return any(site.known_result.uses_rng for site in self.sites.values())


def with_outputs(graph: Graph, count: int) -> Graph:
    """Return ``graph`` with only the first ``count`` of its outputs."""
    if count == len(graph.outputs):
        return graph
    proto = onnx.ModelProto()
    proto.CopyFrom(graph.proto)
    del proto.graph.output[count : len(graph.outputs)]
    return replace(graph, proto=proto, outputs=graph.outputs[:count])
