"""The plans of one graph: out of the export cache, or made and put there."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from torch2ort.autotune.calibration import calibration_store, runs
from torch2ort.autotune.hardware_key import machine
from torch2ort.cache.key.key import Unkeyable
from torch2ort.cache.store.graph_entries import Kept, Shelf
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
    # What traces takes long to import, and a warm start does not trace.
    from torch2ort.autotune.tuner import Tuner
    from torch2ort.training.plan_builder import Planner

_PROGRAM = "joint.json.z"
_REFUSED = "refused"
# Of the time of a start, the part in which it may measure operators.
_PART = 0.1
_Plan = TypeVar("_Plan", ForwardPlan, BackwardPlan)


class Plans:
    """The plans of one graph and one set of tensors that require gradients.

    Args:
        program: the program.
        requires_grad: the graph inputs (model inputs and weights) that require gradients.
        options: of the module.
        target: what graphs are for.

    Attributes:
        forward: the plan of the forward half.
        shelf: the graph's place in the cache; ``None`` where nothing is kept.

    Raises:
        UnsupportedOperatorError: the program has something that the engine does not take.
    """

    def __init__(
        self, program: Program, requires_grad: frozenset[str], options: Options, target: Target
    ) -> None:
        self._target, self._options = target, options
        self._planner: Planner | None = None
        # The joint graph, where another process made it and a backward may still be wanted of it.
        self._stored = b""
        self.shelf = program.shelf
        self._store: Store | None = None if program.shelf is None else program.shelf.store
        # Where no plan is for sizes that vary there is another way, which the next process takes at once.
        self._remembers = any(isinstance(size, str) for dims in program.interface.sizes.dims for size in dims)
        self._settings = {
            "requires_grad": json.dumps(sorted(requires_grad)),
            "machine": json.dumps(machine(options)),
            "calibration": str(runs(options)),
            "in kernels": json.dumps(sorted(target.in_kernels)),
            "mode": options.mode,
        }
        if self.shelf is not None:
            self._settings.update(identity(options))
        self._fuses: Callable[[Sequence[str]], Collection[str]] | None = None
        if options.is_on("fuse"):
            self._settings["fuse"] = "regions"
            from torch2ort.fusion.compiled_regions import compiled

            self._fuses = lambda texts: compiled(texts, self._store)
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
        traced.forget()

    def backward(self, missing: Collection[int]) -> BackwardPlan:
        """The plan of the backward half.

        Args:
            missing: positions of the outputs that have no gradient.

        Raises:
            UnsupportedOperatorError: an operator fits into no graph.
        """
        return self._obtain(
            "joint backward",
            {"outputs without a gradient": json.dumps(sorted(missing))},
            lambda: self._made().backward(missing),
            lambda plan, shelf: plan.stored(self.forward, shelf.key),
            lambda kept, shelf: BackwardPlan.loaded(kept, self.forward, shelf.key),
        )

    def _tuner(self) -> Tuner | None:
        """What decides by measurement who does an operator; ``None`` where the rule decides alone."""
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
        """The share of a step's time that recomputation may take."""
        from torch2ort.differentiate.recompute import DEFAULT_SHARE

        return 0.0 if self._options.mode == "max" else DEFAULT_SHARE

    def _made(self) -> Planner:
        """What makes plans: of this process, or of the one that stored the forward half."""
        if self._planner is None:
            with phase(IMPORTS):
                from torch2ort.sizes.unbacked_sizes import conditions
                from torch2ort.training.joint_graph_json import loaded_joint
                from torch2ort.training.plan_builder import Planner

            joint, feeds = loaded_joint(zlib.decompress(self._stored), self.forward.half.calls)
            known = conditions(joint.graph_module.graph)
            self._planner = Planner(
                joint, feeds, self._target, known, self._fuses, self._tuner(), self._share()
            )
            self._stored = b""
        return self._planner

    def _store_forward(self, plan: ForwardPlan, shelf: Shelf) -> Kept:
        from torch2ort.training.joint_graph_json import stored_joint

        assert self._planner is not None
        kept = plan.stored(shelf.key)
        text = stored_joint(self._planner.joint, self._planner.feeds, plan.half.calls)
        return Kept({**kept.data, "joint": self._note(text)}, {**kept.files, _PROGRAM: zlib.compress(text)})

    def _load_forward(self, kept: Kept, shelf: Shelf) -> ForwardPlan:
        plan = ForwardPlan.loaded(kept, shelf.key)
        self._stored = kept.files[_PROGRAM]
        self._settings["joint graph"] = kept.data["joint"]
        return plan

    def _note(self, text: bytes) -> str:
        """Have backward halves found beside this joint graph alone, which says what forward leaves."""
        self._settings["joint graph"] = sha256(text)
        return self._settings["joint graph"]

    def _find_libraries(self, half: Lowered | None) -> None:
        """Have what the fused regions of a half are compiled to in this process.

        Raises:
            Unkeyable: it is not in the cache any more, and cannot be made.
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
        store: Callable[[_Plan, Shelf], Kept],
        load: Callable[[Kept, Shelf], _Plan],
    ) -> _Plan:
        """A plan out of the cache, or made and put there."""
        shelf = self.shelf
        if shelf is None:
            return make()
        made: list[_Plan] = []

        def kept() -> Kept:
            try:
                made.append(make())
            except UnsupportedOperatorError as error:
                if not self._remembers:
                    raise
                return Kept({_REFUSED: str(error)}, {})
            return store(made[0], shelf)

        try:
            found = shelf.obtain(kind, {**self._settings, **settings}, kept)
        except Unkeyable as reason:
            logger.info("the %s is not cached: %s.", kind, reason)
            self.shelf = None
            return made[0]
        if _REFUSED in found.data:
            raise UnsupportedOperatorError(str(found.data[_REFUSED]))
        if made:
            return made[0]
        try:
            plan = load(found, shelf)
            self._find_libraries(plan.half)
            return plan
        except (Torch2OrtError, Unkeyable) as error:
            logger.info("the %s in the cache does not fit this process: %s", kind, error)
            # Neither would what goes with another plan.
            self.shelf = None
            return make()
