"""What goes into an export, and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from torch2ort import io_schema
from torch2ort.cache.report import CacheReport
from torch2ort.cache.store.shelf import Shelf
from torch2ort.capture.origins import Origin
from torch2ort.capture.trace import DimSpec
from torch2ort.capture.views import View
from torch2ort.effects import NO_EFFECTS, Effects
from torch2ort.graph.graph import Graph
from torch2ort.graph.interface import Interface


@dataclass(frozen=True)
class Call:
    """One call of a model, as an export takes it.

    Attributes:
        signature: names and defaults of the model's arguments.
        tensors: its tensors, flat.
        schema: the structure around them.
        dim_specs: per tensor, which dimensions vary.
        numbers: positions of the tensors that stand for numbers.
    """

    signature: io_schema.Signature
    tensors: Sequence[torch.Tensor]
    schema: io_schema.Schema
    dim_specs: Sequence[DimSpec]
    numbers: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Built:
    """An exported graph whose weights are still the model's own.

    Attributes:
        graph: weights are graph inputs.
        weights: graph input -> the model's tensor.
        interface: how a call maps to the graph's inputs and outputs.
        training: the mode that was exported.
        origins: what each output is if it is a tensor that was there before.
        views: how each output is a view of such a tensor, or of another output.
        tracked: whether each output requires a gradient in eager PyTorch.
        effects: what a run leaves in Python objects; its tensors are the last outputs.
        report: what the export cache did.
        shelf: where engines keep what they build from the graph.
    """

    graph: Graph
    weights: dict[str, torch.Tensor]
    interface: Interface
    training: bool
    origins: tuple[Origin, ...]
    views: tuple[View | None, ...]
    tracked: tuple[bool, ...]
    report: CacheReport = field(default_factory=CacheReport)
    shelf: Shelf | None = None
    effects: Effects = NO_EFFECTS
