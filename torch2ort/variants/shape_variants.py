"""The graphs of an ORTModule, and the choice of the one that accepts a call's sizes."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from torch2ort.cache.key.export_lock import exclusive
from torch2ort.capture.sample_call import DimSpec
from torch2ort.exported_model import ExportedModel
from torch2ort.graph.graph import with_outputs
from torch2ort.log import suppress_libraries
from torch2ort.options import Options
from torch2ort.program.program import Program
from torch2ort.program.traced_program import TracedProgram
from torch2ort.pythonop.autocast import off
from torch2ort.runtime import InferenceEngine
from torch2ort.runtime.memory_overlap import WrittenMemory
from torch2ort.support.lazy import Lazy
from torch2ort.support.startup_timing import DIFFERENTIATE, Startup, phase
from torch2ort.training.engine import Engine
from torch2ort.training.ort_targets import engine_of, inference_engine_of, row_plans_of
from torch2ort.training.packed_engine import ComparedStep, PackedStep
from torch2ort.training.row_plans import RowPlans, may_have_rows

Shapes = tuple[torch.Size, ...]
DimSpecs = tuple[DimSpec, ...]
_AUTO = torch.export.Dim.AUTO


@dataclass
class Variant:
    """One exported graph with the engines built for it.

    Attributes:
        program: the exported program.
        weights: its weights, looked up in the model at each access.
        requires_grad: the graph inputs that require gradients; empty if autograd does not record.
        options: threads and debugging.
        verified: True if a run was compared with eager PyTorch.
        started: True if it has run.
        name: name of the model's class.
        rows: the choice of the rows that a step computes; ``None`` where it computes all.
    """

    program: Program
    weights: Mapping[str, torch.Tensor]
    requires_grad: frozenset[str]
    options: Options
    verified: bool = False
    started: bool = False
    name: str = ""
    rows: RowPlans | None = None
    _training: Engine | None = None
    # The operators, until the first step shows if they have rows.
    _traced: Lazy[TracedProgram] | None = None
    _inference: InferenceEngine | None = None
    _picked: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None

    def pick(self, names: tuple[str, ...], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the graph's weights, from the module's present tensors, and its constants.

        Args:
            names: names of the module's parameters and buffers.
            tensors: one per name; the same list as long as no tensor is replaced.
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
        """The graph as an ExportedModel for the user."""
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
        """Run forward without gradients, and return the outputs.

        Args:
            feeds: in the order of the signature. A graph that is translated later may lack a weight that is
                only written to.

        Raises:
            EngineError: ONNX Runtime failed. An exception of a Function is raised unchanged.
        """
        engine, graph, signature = self.inference_engine(), self.program.graph, self.program.signature
        if graph is not signature:
            assert graph.fetches == signature.fetches, "a translation has other outputs than its trace"
            given = dict(zip(signature.feeds, feeds, strict=True))
            feeds = [given[name] for name in graph.feeds]
        return engine.run(feeds)

    @functools.cached_property
    def fetches(self) -> tuple[str, ...]:
        """All outputs of the graph, in order."""
        return self.program.signature.fetches

    @functools.cached_property
    def written(self) -> WrittenMemory | None:
        """The memory that the graph writes to; ``None`` if it writes to nothing."""
        mutations = self.program.signature.mutations
        same = self.program.interface.same
        return WrittenMemory(self.program.signature.inputs, mutations, same) if mutations else None

    @functools.cached_property
    def varies(self) -> bool:
        """True if a size that the graph accepts varies."""
        return any(isinstance(size, str) for dims in self.program.interface.sizes.dims for size in dims)

    def with_new_sessions(self) -> Variant:
        """Return the same graph with a new engine, whose sessions are created now; this one keeps its own."""
        with off():
            training = None if self._training is None else self._training.with_new_sessions()
            rows = None if self.rows is None else self.rows.with_new_sessions()
        return replace(self, rows=rows, _training=training, _inference=None)

    def training_engine(self) -> Engine:
        """Return the engine that computes gradients, too; build it at the first call."""
        if self._training is None:
            with exclusive.looking(), phase(DIFFERENTIATE), suppress_libraries(), off():
                # Another thread may have built it while this one waited.
                if self._training is None:
                    traced = self.program.traced
                    if self.options.sparsity != "off" and traced is not None:
                        self._traced = traced.fork()
                    self._training = engine_of(self.program, self.requires_grad, self.options)
        return self._training

    def training_step(
        self, feeds: Sequence[torch.Tensor], startup: Startup, *, is_sharded: bool
    ) -> Engine | PackedStep | ComparedStep:
        """Return the engine of one step, which may compute some rows alone.

        Args:
            feeds: in the order of the signature.
            startup: receives the time of building an engine.
            is_sharded: True if other processes hold parts of the weights. They must take part in each
                exchange of weights, which is tested for dense steps alone.
        """
        engine = self.training_engine()
        if self._traced is not None:
            traced, self._traced = self._traced, None
            if may_have_rows(feeds[: len(self.program.signature.inputs)]):
                with startup.recording(DIFFERENTIATE), exclusive.looking():
                    self.rows = row_plans_of(
                        self.name, self.program, traced, self.requires_grad, self.options
                    )
        if self.rows is None or not engine.differentiable:
            return engine
        if is_sharded and self.options.sparsity == "auto":
            return engine
        return self.rows.select(engine, feeds, startup)

    def narrow(self) -> None:
        """Restrict the accepted sizes to those of the derivatives; this builds the training engine."""
        conditions = self.training_engine().conditions
        if conditions:
            interface = self.program.interface
            interface = replace(interface, sizes=interface.sizes.with_guards(conditions))
            self.program = replace(self.program, interface=interface)

    def inference_engine(self) -> InferenceEngine:
        """Return the engine that runs forward only; build it at the first call."""
        if self._inference is None:
            with exclusive.looking(), suppress_libraries(), off():
                if self._inference is None:
                    self._inference = inference_engine_of(self.program, self.options)
        return self._inference


@dataclass
class Family:
    """The variants that differ only in the sizes for which they were exported.

    Attributes:
        variants: in the order of their exports.
        by_shapes: a call's shapes -> the variant that serves them, cached at the first search.
        seen: the shapes for which variants were exported.
        refused: the choices of varying dimensions whose export failed.
        explained: True if the log contains the reason why a graph for varying sizes does not serve all calls.
    """

    variants: list[Variant] = field(default_factory=list)
    by_shapes: dict[Shapes, Variant] = field(default_factory=dict)
    seen: list[Shapes] = field(default_factory=list)
    refused: list[DimSpecs] = field(default_factory=list)
    explained: bool = False

    def find(self, shapes: Shapes) -> Variant | None:
        """Return the variant that accepts ``shapes``; ``None`` if there is none."""
        known = self.by_shapes.get(shapes)
        if known is not None:
            return known
        for variant in reversed(self.variants):
            if variant.program.interface.sizes.mismatch(shapes) is None:
                self.by_shapes[shapes] = variant
                return variant
        return None

    def why_another(self, shapes: Shapes) -> str | None:
        """Return the condition by which the latest graph for varying sizes does not accept ``shapes``.

        Only the first call returns it, later ones return ``None``.
        """
        sizes = next((v.program.interface.sizes for v in reversed(self.variants) if v.varies), None)
        if sizes is None or self.explained:
            return None
        self.explained = True
        return (sizes.mismatch(shapes) or "").partition("; export")[0]

    def varying(self, shapes: Shapes) -> list[DimSpecs]:
        """Return choices of the dimensions to vary, per input: all, then those whose size differed before.

        The list is empty if no size differed. A size that is the same so far often varies later, and each
        graph costs a start.
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
