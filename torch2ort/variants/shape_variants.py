"""The graphs of an ORTModule, and which of them takes a call's sizes."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from torch2ort.cache.key.export_lock import exclusive
from torch2ort.capture.sample_call import DimSpec
from torch2ort.exported_model import ExportedModel
from torch2ort.graph.graph import with_outputs
from torch2ort.log import quiet
from torch2ort.options import Options
from torch2ort.program.program import Program
from torch2ort.pythonop.autocast import off
from torch2ort.runtime import InferenceEngine
from torch2ort.runtime.memory_overlap import WrittenMemory
from torch2ort.support.startup_timing import DIFFERENTIATE, phase
from torch2ort.training.engine import Engine
from torch2ort.training.ort_targets import engine_of, inference_engine_of

Shapes = tuple[torch.Size, ...]
DimSpecs = tuple[DimSpec, ...]
_AUTO = torch.export.Dim.AUTO


@dataclass
class Variant:
    """One exported graph with the engines built for it.

    Attributes:
        program: the program that it was exported to.
        weights: its weights as they are in the model at each access.
        requires_grad: the graph inputs that gradients are wanted of; empty if autograd does not record.
        options: threads and debugging.
        verified: whether a run was compared with eager PyTorch.
        started: whether it has run.
    """

    program: Program
    weights: Mapping[str, torch.Tensor]
    requires_grad: frozenset[str]
    options: Options
    verified: bool = False
    started: bool = False
    _training: Engine | None = None
    _inference: InferenceEngine | None = None
    _picked: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None

    def pick(self, names: tuple[str, ...], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The graph's weights out of the module's present tensors, and its constants.

        Args:
            names: of the module's parameters and buffers.
            tensors: one a name; the same list while no tensor is replaced.
        """
        kept = self._picked
        if kept is None or kept[0] is not tensors:
            present = dict(zip(names, tensors, strict=True))
            picked = [
                present[origin] if origin in present else self.weights[name]
                for name, origin in self.program.signature.weights.items()
            ]
            kept = self._picked = (tensors, picked)
        return kept[1]

    @functools.cached_property
    def exported(self) -> ExportedModel:
        """The same graph to the user."""
        program = self.program
        return ExportedModel(
            lambda: with_outputs(program.graph, len(program.interface.outputs.leaves)),
            self.weights,
            program.interface,
            training=program.training,
            options=self.options,
            cache=program.report,
        )

    def infer(self, feeds: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What a run forward only gives.

        Args:
            feeds: in the order of the signature, of which a graph translated later may lack a weight that
                nothing but a write replaces.

        Raises:
            EngineError: ONNX Runtime failed. An exception of a Function arrives as it is.
        """
        engine, graph, signature = self.inference_engine(), self.program.graph, self.program.signature
        if graph is not signature:
            assert graph.fetches == signature.fetches, "a translation has other outputs than its trace"
            given = dict(zip(signature.feeds, feeds, strict=True))
            feeds = [given[name] for name in graph.feeds]
        return engine.run(feeds)

    @functools.cached_property
    def fetches(self) -> tuple[str, ...]:
        """Every output of the graph, in order."""
        return self.program.signature.fetches

    @functools.cached_property
    def written(self) -> WrittenMemory | None:
        """What the graph writes to; ``None`` if it writes to nothing."""
        mutations = self.program.signature.mutations
        same = self.program.interface.same
        return WrittenMemory(self.program.signature.inputs, mutations, same) if mutations else None

    @functools.cached_property
    def varies(self) -> bool:
        """Whether a size that the graph accepts varies."""
        return any(isinstance(size, str) for dims in self.program.interface.sizes.dims for size in dims)

    def anew(self) -> Variant:
        """The same graph, with an engine of its own whose sessions are made now; this one has its engine."""
        with off():
            training = None if self._training is None else self._training.anew()
        return replace(self, _training=training, _inference=None)

    def training_engine(self) -> Engine:
        """The engine that computes gradients, too."""
        if self._training is None:
            with exclusive.looking(), phase(DIFFERENTIATE), quiet(), off():
                # Another thread may have built it while this one waited.
                if self._training is None:
                    self._training = engine_of(self.program, self.requires_grad, self.options)
        return self._training

    def narrow(self) -> None:
        """Accept the sizes alone that the derivatives hold for; builds the engine that computes them."""
        conditions = self.training_engine().conditions
        if conditions:
            interface = self.program.interface
            interface = replace(interface, sizes=interface.sizes.narrowed(conditions))
            self.program = replace(self.program, interface=interface)

    def inference_engine(self) -> InferenceEngine:
        """The engine that runs forward only."""
        if self._inference is None:
            with exclusive.looking(), quiet(), off():
                if self._inference is None:
                    self._inference = inference_engine_of(self.program, self.options)
        return self._inference


@dataclass
class Family:
    """The variants that differ only in the sizes they were exported for.

    Attributes:
        variants: in the order of their exports.
        by_shapes: the variant that serves a call's shapes, once it was looked for.
        seen: the shapes that variants were exported for.
        refused: the choices of varying dimensions that an export failed with.
        explained: whether it was told why a graph for sizes that vary does not serve all calls.
    """

    variants: list[Variant] = field(default_factory=list)
    by_shapes: dict[Shapes, Variant] = field(default_factory=dict)
    seen: list[Shapes] = field(default_factory=list)
    refused: list[DimSpecs] = field(default_factory=list)
    explained: bool = False

    def find(self, shapes: Shapes) -> Variant | None:
        """The variant that takes ``shapes``."""
        known = self.by_shapes.get(shapes)
        if known is not None:
            return known
        for variant in reversed(self.variants):
            if variant.program.interface.sizes.mismatch(shapes) is None:
                self.by_shapes[shapes] = variant
                return variant
        return None

    def why_another(self, shapes: Shapes) -> str | None:
        """The condition by which the latest graph for sizes that vary does not take ``shapes``, once."""
        sizes = next((v.program.interface.sizes for v in reversed(self.variants) if v.varies), None)
        if sizes is None or self.explained:
            return None
        self.explained = True
        return (sizes.mismatch(shapes) or "").partition("; export")[0]

    def varying(self, shapes: Shapes) -> list[DimSpecs]:
        """Choices of the dimensions to vary, per input: all, then those whose size was another earlier.

        Empty if no size was another. A size that is the same so far often varies later, and each graph costs
        a start.
        """
        seen = [*self.seen, shapes]
        differing: DimSpecs = tuple(
            {axis: _AUTO for axis in range(len(shape)) if len({other[i][axis] for other in seen}) > 1} or None
            for i, shape in enumerate(shapes)
        )
        if not any(differing):
            return []
        every: DimSpecs = tuple(dict.fromkeys(range(len(shape)), _AUTO) or None for shape in shapes)
        return [every] if every == differing else [every, differing]
