"""A model's call as a graph, with its interface and other data for its runs."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch

from torch2ort.cache.report import CacheReport
from torch2ort.cache.store.graph_entries import GraphEntries
from torch2ort.capture.output_ties import Ties
from torch2ort.effects import NO_EFFECTS, Effects
from torch2ort.graph.graph import Graph, GraphSignature
from torch2ort.graph.interface import Interface
from torch2ort.program.traced_program import TracedProgram
from torch2ort.support.lazy import Lazy


@dataclass(frozen=True)
class Program:
    """One call of a model, exported, whose weights are still the model's own.

    Attributes:
        signature: names of the graph's tensors; the graph itself once it is translated.
        weights: graph input -> the model's tensor.
        interface: map of a call's arguments and results to the graph's inputs and outputs.
        training: the mode that was exported.
        ties: the tensors that outputs are tied to in eager PyTorch.
        effects: the effects of a run on Python objects; their tensors are the last outputs.
        report: use of the export cache.
        graph_entries: place where engines store results that they build from the graph.
        writer: the first Function that writes to objects, empty where the model does; ``None`` if none does.
        traced: the operators, for engines that differentiate them; ``None`` without such an engine.
        onnx: makes the graph where it is not translated yet.
        form: name of a rewritten form of the operators, which the plans of its steps depend on; empty for
            the operators as they were traced.
    """

    signature: GraphSignature
    weights: dict[str, torch.Tensor]
    interface: Interface
    training: bool
    ties: Ties
    report: CacheReport = field(default_factory=CacheReport)
    graph_entries: GraphEntries | None = None
    effects: Effects = NO_EFFECTS
    writer: str | None = None
    traced: Lazy[TracedProgram] | None = None
    onnx: Lazy[Graph] | None = None
    form: str = ""

    @property
    def graph(self) -> Graph:
        """The graph, translated if necessary; its weights are graph inputs."""
        if isinstance(self.signature, Graph):
            return self.signature
        assert self.onnx is not None
        return self.onnx.get()

    @functools.cached_property
    def is_tied(self) -> bool:
        """True if outputs are tied to anything."""
        return self.ties.exist()
