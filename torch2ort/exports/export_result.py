"""What comes out of an export."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch

from torch2ort.cache.report import CacheReport
from torch2ort.cache.store.graph_entries import Shelf
from torch2ort.capture.aliased_outputs import Origin
from torch2ort.capture.orphan_grad_outputs import DeadEnd
from torch2ort.capture.output_views import View
from torch2ort.effects import NO_EFFECTS, Effects
from torch2ort.exports.lazy_graph import LazyGraph
from torch2ort.graph.graph import Graph, GraphSignature
from torch2ort.graph.interface import Interface
from torch2ort.program.traced_program import Program


@dataclass(frozen=True)
class Built:
    """An exported graph whose weights are still the model's own.

    Attributes:
        signature: names of the graph's tensors; the graph itself where it is translated already.
        weights: graph input -> the model's tensor.
        interface: how a call maps to the graph's inputs and outputs.
        training: the mode that was exported.
        origins: what each output is if it is a tensor that was there before.
        views: how each output is a view of such a tensor, or of another output.
        tracked: whether each output requires a gradient in eager PyTorch.
        dead_ends: which outputs require one there that reaches no tensor of the caller's.
        effects: what a run leaves in Python objects; its tensors are the last outputs.
        report: what the export cache did.
        shelf: where engines keep what they build from the graph.
        writer: the first Function that writes to objects, empty where the model does; ``None`` if none does.
        program: the traced program, for an engine that differentiates it itself.
        lazy: makes the graph where it is not translated yet.
    """

    signature: GraphSignature
    weights: dict[str, torch.Tensor]
    interface: Interface
    training: bool
    origins: tuple[Origin, ...]
    views: tuple[View | None, ...]
    tracked: tuple[bool, ...]
    dead_ends: tuple[DeadEnd, ...]
    report: CacheReport = field(default_factory=CacheReport)
    shelf: Shelf | None = None
    effects: Effects = NO_EFFECTS
    writer: str | None = None
    program: Program | None = None
    lazy: LazyGraph | None = None

    @property
    def graph(self) -> Graph:
        """The graph, translated by now; its weights are graph inputs."""
        if isinstance(self.signature, Graph):
            return self.signature
        assert self.lazy is not None
        return self.lazy.graph()

    @functools.cached_property
    def is_tied(self) -> bool:
        """Whether an output is, views or requires a gradient of something that no run of the graph makes."""
        return any(self.origins) or any(self.views) or bool(self.dead_ends)
