"""The plans of one graph: read from the export cache, or built and stored there."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from torch2ort.autotune.calibration import calibration_store, runs
from torch2ort.autotune.hardware_key import machine
from torch2ort.cache.key.key import Unkeyable
from torch2ort.cache.store.graph_entries import EntryContent, GraphEntries
from torch2ort.cache.store.manifest import sha256
from torch2ort.cache.store.store import Store
from torch2ort.errors import Torch2OrtError, UnsupportedOperatorError
from torch2ort.fusion.region_function import FusedRegion
from torch2ort.graph.lowered_graph import Lowered
from torch2ort.log import logger
from torch2ort.options import Options
from torch2ort.program.program import Program
from torch2ort.program.target import Target
from torch2ort.runtime.optimized_model import identity
from torch2ort.support.startup_timing import IMPORTS, phase, spent
from torch2ort.training.step_plan import BackwardPlan, ForwardPlan

if TYPE_CHECKING:
    # These modules import slowly, and a start with a filled cache does not trace.
    from torch2ort.autotune.tuner import Tuner
    from torch2ort.training.plan_builder import Planner

_PROGRAM = "joint.json.z"
_REFUSED = "refused"
# Fraction of a start's time that it may spend on measuring operators.
_PART = 0.1
_Plan = TypeVar("_Plan", ForwardPlan, BackwardPlan)


class Plans:
    """The plans of one graph and one set of tensors that require gradients.

    Args:
        program: the program.
        requires_grad: the graph inputs (model inputs and weights) that require gradients.
        options: the module's options.
        target: the target of graphs.

    Attributes:
        forward: the plan of the forward half.
        graph_entries: the graph's place in the cache; ``None`` where nothing is stored.

    Raises:
        UnsupportedOperatorError: the engine does not support an operator of the program.
    """

    def __init__(
        self, program: Program, requires_grad: frozenset[str], options: Options, target: Target
    ) -> None:
        self._target, self._options = target, options
        self._planner: Planner | None = None
        # The joint graph of another process, for backward halves that are still to be built.
        self._stored = b""
        self.graph_entries = program.graph_entries
        self._store: Store | None = None if program.graph_entries is None else program.graph_entries.store
        # If a size varies and the forward half cannot be built, the error is stored, too: the next process
        # raises it at once, and exports with fixed sizes.
        self._remembers = any(isinstance(size, str) for dims in program.interface.sizes.dims for size in dims)
        self._settings = {
            "requires_grad": json.dumps(sorted(requires_grad)),
            "machine": json.dumps(machine(options)),
            "calibration": str(runs(options)),
            "in kernels": json.dumps(sorted(target.in_kernels)),
            "mode": options.mode,
        }
        if program.form:
            self._settings["form"] = program.form
        if self.graph_entries is not None:
            self._settings.update(identity(options))
        self._fuses: Callable[[Sequence[str]], Collection[str]] | None = None
        if options.is_on("fuse"):
            self._settings["fuse"] = "regions"
            from torch2ort.fusion.compiled_regions import compile_or_load

            self._fuses = lambda texts: compile_or_load(texts, self._store)
        if options.is_on("autotune"):
            self._settings["autotune"] = "all"
        traced = program.traced
        assert traced is not None

        def make() -> ForwardPlan:
            with phase(IMPORTS):
                from torch2ort.training.plan_builder import Planner

            self._planner, plan = Planner.of_program(
                program.signature,
                traced.get(),
                requires_grad,
                target,
                self._fuses,
                self._tuner(),
                self._share(),
            )
            return plan

        self.forward = self._obtain("joint forward", {}, make, self._store_forward, self._load_forward)
        self._remembers = False
        traced.release()

    def backward(self, missing: Collection[int]) -> BackwardPlan:
        """Return the plan of the backward half.

        Args:
            missing: positions of the outputs that have no gradient.

        Raises:
            UnsupportedOperatorError: an operator cannot be part of a graph.
        """
        return self._obtain(
            "joint backward",
            {"outputs without a gradient": json.dumps(sorted(missing))},
            lambda: self._load_planner().backward(missing),
            lambda plan, graph_entries: plan.to_entry(self.forward, graph_entries.key),
            lambda kept, graph_entries: BackwardPlan.from_entry(kept, self.forward, graph_entries.key),
        )

    def _tuner(self) -> Tuner | None:
        """Return the tuner, which chooses libraries by measurement; ``None`` where only the rule decides."""
        store, measures_all = calibration_store(self._options), self._options.is_on("autotune")
        if store is None and not measures_all:
            return None
        from torch2ort.autotune.alternatives import ALTERNATIVES, BETWEEN_LIBRARIES
        from torch2ort.autotune.tuner import Tuner

        if measures_all:
            return Tuner(self._target, self._options, store, table=ALTERNATIVES)
        part, level = (lambda: _PART * spent()), logging.DEBUG
        return Tuner(self._target, self._options, store, table=BETWEEN_LIBRARIES, budget=part, level=level)

    def _share(self) -> float:
        """Return the fraction of a step's time that recomputation may take."""
        from torch2ort.differentiate.recompute import DEFAULT_SHARE

        return 0.0 if self._options.mode == "max" else DEFAULT_SHARE

    def _load_planner(self) -> Planner:
        """Return the planner: this process's own, or one from the joint graph that another process stored."""
        if self._planner is None:
            with phase(IMPORTS):
                from torch2ort.sizes.unbacked_sizes import conditions
                from torch2ort.training.joint_graph_json import loaded_joint
                from torch2ort.training.plan_builder import Planner

            joint, feeds = loaded_joint(zlib.decompress(self._stored), self.forward.lowered.calls)
            known = conditions(joint.graph_module.graph)
            self._planner = Planner(
                joint, feeds, self._target, known, self._fuses, self._tuner(), self._share()
            )
            self._stored = b""
        return self._planner

    def _store_forward(self, plan: ForwardPlan, graph_entries: GraphEntries) -> EntryContent:
        from torch2ort.training.joint_graph_json import stored_joint

        assert self._planner is not None
        kept = plan.to_entry(graph_entries.key)
        text = stored_joint(self._planner.joint, self._planner.feeds, plan.lowered.calls)
        return EntryContent(
            {**kept.data, "joint": self._note(text)}, {**kept.files, _PROGRAM: zlib.compress(text)}
        )

    def _load_forward(self, kept: EntryContent, graph_entries: GraphEntries) -> ForwardPlan:
        plan = ForwardPlan.from_entry(kept, graph_entries.key)
        self._stored = kept.files[_PROGRAM]
        self._settings["joint graph"] = kept.data["joint"]
        return plan

    def _note(self, text: bytes) -> str:
        """Make the keys of backward halves depend on this joint graph, which determines the saved values."""
        self._settings["joint graph"] = sha256(text)
        return self._settings["joint graph"]

    def _find_libraries(self, half: Lowered | None) -> None:
        """Load the compiled fused regions of a half.

        Raises:
            Unkeyable: one is not in the cache any more, and cannot be compiled.
        """
        calls = () if half is None else half.calls.values()
        texts = [site.arguments[0] for site in calls if site.function is FusedRegion]
        if texts and not (self._fuses and set(texts) <= set(self._fuses(texts))):
            raise Unkeyable("a fused region cannot be compiled here")

    def _obtain(
        self,
        kind: str,
        settings: Mapping[str, str],
        make: Callable[[], _Plan],
        store: Callable[[_Plan, GraphEntries], EntryContent],
        load: Callable[[EntryContent, GraphEntries], _Plan],
    ) -> _Plan:
        """Return a plan from the cache, or build and store it."""
        graph_entries = self.graph_entries
        if graph_entries is None:
            return make()
        made: list[_Plan] = []

        def kept() -> EntryContent:
            try:
                made.append(make())
            except UnsupportedOperatorError as error:
                if not self._remembers:
                    raise
                return EntryContent({_REFUSED: str(error)}, {})
            return store(made[0], graph_entries)

        try:
            found = graph_entries.obtain(kind, {**self._settings, **settings}, kept)
        except Unkeyable as reason:
            logger.info("the %s is not cached: %s.", kind, reason)
            self.graph_entries = None
            return made[0]
        if _REFUSED in found.data:
            raise UnsupportedOperatorError(str(found.data[_REFUSED]))
        if made:
            return made[0]
        try:
            plan = load(found, graph_entries)
            self._find_libraries(plan.lowered)
            return plan
        except (Torch2OrtError, Unkeyable) as error:
            logger.info("the %s in the cache does not fit this process: %s", kind, error)
            # Other entries that depend on this plan would not fit either.
            self.graph_entries = None
            return make()
