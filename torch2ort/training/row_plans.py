"""The steps of a graph that compute the rows alone that a call needs, and the choice between them."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from torch2ort.cache.key.export_lock import exclusive
from torch2ort.cache.key.key import Unkeyable
from torch2ort.cache.store.graph_entries import EntryContent
from torch2ort.graph.graph import GraphSignature
from torch2ort.log import logger, suppress_libraries
from torch2ort.options import Options
from torch2ort.program.program import Program
from torch2ort.program.sparsity.inspection import LABELS, PADDING, Inspection, Needed, input_names
from torch2ort.pythonop.autocast import off
from torch2ort.support.lazy import Lazy
from torch2ort.support.startup_timing import DIFFERENTIATE, IMPORTS, Startup, phase
from torch2ort.training.engine import Engine
from torch2ort.training.packed_engine import ComparedStep, PackedEngine, PackedStep

if TYPE_CHECKING:
    from torch2ort.program.traced_program import TracedProgram

RowPlan = frozenset[str]
DENSE: RowPlan = frozenset()
Form = tuple[RowPlan, tuple[str, ...]]
# Calls whose mean density decides.
_WINDOW = 4
# Shares of the dense step's work below which a plan begins, and above which it ends.
_BEGIN, _END = 0.92, 0.96
# The share of a dense step that gathering rows for attention costs, and scattering them.
_PACKING = 0.04
# A plan replaces another one if it has this share of its work.
_BETTER = 0.9
# Estimated operations of a forward below which finding the rows would cost more than plans gain.
_SMALL = 3e8
# The trace of a program assumes that no size is 0 or 1.
_FEWEST = 2


@dataclass(frozen=True)
class Density:
    """The work of a program that depends on rows, as the export cache stores it.

    Attributes:
        inspection: counts the rows; ``None`` if no work depends on them.
        work: estimated operations of a forward for rows that are read, for those that are needed, and others.
        reason: the operator that reads all rows, with its line; empty if there is none.
    """

    inspection: Inspection | None
    work: tuple[float, float, float]
    reason: str

    def share(self, plan: RowPlan, read: float, attended: float) -> float:
        """Return the work of a plan as a share of the whole program's.

        Args:
            plan: :data:`LABELS`, :data:`PADDING`, both, or none.
            read: the share of rows that are read.
            attended: the share of rows that are needed.
        """
        of_read, of_attended, rest = self.work
        kept = attended if PADDING in plan else 1.0
        found = rest + of_attended * kept + of_read * (read if LABELS in plan else kept)
        return found / sum(self.work) + (_PACKING if PADDING in plan else 0.0)

    def plans(self) -> list[RowPlan]:
        """Return the plans that change the program, without :data:`DENSE`."""
        of_read, of_attended, _ = self.work
        found = [frozenset({LABELS})] if of_read else []
        if of_attended or (of_read and not self.reason):
            found += [frozenset({PADDING})]
        if of_attended:
            found += [frozenset({LABELS, PADDING})] if of_read else []
        return found


def may_have_rows(inputs: Sequence[torch.Tensor]) -> bool:
    """Return True if a model's inputs may be a batch of sequences with a mask, labels or indices."""
    of_indices = any(not t.is_floating_point() and t.dim() > 1 for t in inputs)
    return of_indices or (any(t.dim() > 2 for t in inputs) and any(t.dim() == 2 for t in inputs))


class RowPlans:
    """The steps of one graph and one set of tensors that require gradients.

    Args:
        name: name of the model's class.
        program: the program.
        traced: its operators.
        requires_grad: the graph inputs that require gradients.
        options: the module's options.
        build: builds the engine of a program.

    Attributes:
        plan: the plan for calls like the last ones.
        density: the work that depends on rows.
    """

    def __init__(
        self,
        name: str,
        program: Program,
        traced: Lazy[TracedProgram],
        requires_grad: frozenset[str],
        options: Options,
        build: Callable[[Program], Engine],
    ) -> None:
        self._model, self._program, self._requires_grad = name, program, requires_grad
        self._options, self._build = options, build
        self._traced = traced
        self.density = self._obtain()
        # The shares of labels and of tokens in the last call that was counted.
        self._seen: tuple[float | None, float | None] = (None, None)
        self.plan = self._ran = DENSE
        self._last: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        # By the plan, and the kinds of masks where attention is packed.
        self._engines: dict[Form, PackedEngine] = {}
        self._refused: set[RowPlan] = set()
        self._compared: set[Form] = set()
        self._skipped = 0
        self._counts_before: tuple[int, ...] = ()
        if self.density.reason:
            kept = "all rows are" if self.density.inspection is None else "padding is"
            self._log("%s computed, as %s", kept, self.density.reason)
        elif self._is_forced and frozenset({options.sparsity}) not in self.density.plans():
            self._log("no operator computes %s alone", options.sparsity)
        if self.density.inspection is None:
            self._traced.release()

    @property
    def _is_forced(self) -> bool:
        return self._options.sparsity in (LABELS, PADDING)

    def report(self) -> dict[str, Any]:
        """Return what was seen, and the plan; see :meth:`torch2ort.ORTModule.density`."""
        labels, tokens = self._seen
        return {"labels": labels, "tokens": tokens, "plan": self._name(self._ran)}

    def with_new_sessions(self) -> RowPlans:
        """Return the same plans, whose sessions are created now."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other._engines = {form: engine.with_new_sessions() for form, engine in self._engines.items()}
        return other

    # --- the choice

    def select(
        self, dense: Engine, feeds: Sequence[torch.Tensor], startup: Startup
    ) -> Engine | PackedStep | ComparedStep:
        """Return the engine for a call.

        Args:
            dense: the engine that computes all rows.
            feeds: the call's feeds.
            startup: receives the time of building an engine, and of its comparison with the dense one.
        """
        inspection, self._ran = self.density.inspection, DENSE
        if inspection is None or self._may_skip(inspection, feeds):
            return dense
        try:
            needed = inspection(feeds)
        except Exception as error:
            # The step itself raises the error that PyTorch has for these inputs.
            self._log("the rows of a call are unknown (%s)", error)
            return dense
        self._seen = needed.labels, needed.tokens
        plan = self._choose(needed)
        if plan != self.plan:
            self._log_change(plan, needed)
            self.plan = plan
        if plan == DENSE or min(self._counts(plan, needed).values()) < _FEWEST:
            return dense
        form = plan, needed.kinds() if PADDING in plan else ()
        engine = self._engine(form, needed, startup)
        if engine is None:
            self.plan = DENSE
            return dense
        step = engine.step(needed, feeds)
        if step is None:
            return dense
        self._ran = plan
        if form in self._compared:
            return step
        return ComparedStep(dense, step, startup, lambda difference: self._finish(form, difference))

    def _may_skip(self, inspection: Inspection, feeds: Sequence[torch.Tensor]) -> bool:
        """Return True for a call whose rows need not be found.

        They are found in the first calls and as long as a plan is in use. While calls need all rows, numbers
        in masks and labels are counted in each call, and rows are found where a count differs and in one of
        four calls; in small steps, not at all.
        """
        if self._is_forced or len(self._last) < _WINDOW:
            return False
        if sum(self.density.work) < _SMALL:
            return True
        if self.plan != DENSE or min(map(min, self._last)) < _END:
            return False
        counts = inspection.count(feeds)
        self._skipped = (self._skipped + 1) % _WINDOW
        is_same, self._counts_before = counts == self._counts_before, counts
        return is_same and self._skipped != 0

    def _choose(self, needed: Needed) -> RowPlan:
        """Return the plan for the densities of the last calls."""
        total = needed.read.numel()
        self._last.append((needed.num_read / total, needed.num_attended / total))
        read, attended = (sum(values) / len(self._last) for values in zip(*self._last, strict=True))
        plans = [plan for plan in self.density.plans() if plan not in self._refused]
        if self._is_forced:
            wanted = frozenset({self._options.sparsity})
            return wanted if wanted in plans else DENSE
        if sum(self.density.work) < _SMALL:
            return DENSE
        shares = {plan: self.density.share(plan, read, attended) for plan in plans}
        now = shares.get(self.plan, 1.0)
        best = min(shares, key=lambda plan: (shares[plan], len(plan)), default=DENSE)
        if self.plan == DENSE or self.plan not in shares:
            return best if best and shares[best] < _BEGIN else DENSE
        if shares[best] < now * _BETTER:
            return best
        return DENSE if now > _END else self.plan

    # --- the engines

    def _engine(self, form: Form, needed: Needed, startup: Startup) -> PackedEngine | None:
        """Return the engine of a form, built on its first use; ``None`` if the program has none."""
        plan, _ = form
        if form not in self._engines and plan not in self._refused:
            with startup.recording(DIFFERENTIATE), exclusive.looking(), suppress_libraries(), off():
                if form not in self._engines and plan not in self._refused:
                    try:
                        self._engines[form] = self._build_engine(form, needed)
                    except Exception as error:
                        # A defect of a plan must not end a training that needs no plan.
                        self._refused.add(plan)
                        self._log("no step leaves out %s: %s", self._name(plan), error)
        return self._engines.get(form)

    def _build_engine(self, form: Form, needed: Needed) -> PackedEngine:
        """Return the engine of a form.

        Raises:
            UnsupportedOperatorError: the program cannot be packed.
        """
        plan, kinds = form
        counts = {"read": needed.num_read, "attended": needed.num_attended}

        def pack() -> TracedProgram:
            with phase(IMPORTS):
                from torch2ort.program.sparsity.rewrite import packed_program

            source = self._traced.get()
            return packed_program(source, source.wants_gradients(self._requires_grad), plan, counts, kinds)

        old = self._program.signature
        names = input_names(PADDING in plan, LABELS in plan)
        signature = GraphSignature((*old.inputs, *names), old.weights, old.outputs, old.mutations)
        text = f"{', '.join(sorted(plan))}; {', '.join(kinds)}"
        program = replace(self._program, signature=signature, traced=Lazy(pack), onnx=None, form=text)
        return PackedEngine(self._build(program), len(old.inputs), names)

    @staticmethod
    def _counts(plan: RowPlan, needed: Needed) -> Mapping[str, int]:
        found = {"attended": needed.num_attended} if PADDING in plan else {}
        return {**found, "read": needed.num_read} if LABELS in plan else found

    def _finish(self, form: Form, difference: str) -> None:
        """Note the comparison of a form's first step with the dense one."""
        self._compared.add(form)
        plan, _ = form
        if difference:
            self._refused.add(plan)
            logger.warning(
                "%s: the step that leaves out %s differs from the dense one (%s) and is not used. Please "
                "report this model; Options(sparsity='off') leaves out nothing",
                self._model,
                self._name(plan),
                difference,
            )

    # --- the cache and the log

    def _obtain(self) -> Density:
        """Return the work that depends on rows, from the cache if it is there."""
        made: list[Density] = []

        def make() -> EntryContent:
            with phase(IMPORTS):
                from torch2ort.program.sparsity.rewrite import opportunity

            source = self._traced.get()
            required = source.wants_gradients(self._requires_grad)
            positions = {name: i for i, name in enumerate(self._program.signature.feeds)}
            try:
                inspection, work, reason = opportunity(source, required, positions)
            except Exception as error:
                # As for plans: a defect of the analysis must not end a training that does not need it.
                inspection, work, reason = None, (0.0, 0.0, 0.0), f"the analysis failed: {error!r}"
            made.append(Density(inspection, work, reason))
            text = None if inspection is None else inspection.to_json()
            return EntryContent({"inspection": text, "work": list(work), "reason": reason}, {})

        entries = self._program.graph_entries
        try:
            if entries is None:
                make()
            else:
                settings = {"requires_grad": json.dumps(sorted(self._requires_grad))}
                found = entries.obtain("density", settings, make)
        except Unkeyable as reason:
            logger.info("the inspection is not cached: %s.", reason)
        if made:
            return made[0]
        text = found.data["inspection"]
        inspection = None if text is None else Inspection.from_json(text)
        return Density(inspection, tuple(found.data["work"]), found.data["reason"])

    def _name(self, plan: RowPlan) -> str:
        """Return a plan as a text."""
        parts = ["padding"] if PADDING in plan else []
        if LABELS in plan:
            has_labels = self.density.inspection is not None and self.density.inspection.counts[2]
            parts.append("labels" if has_labels else "slices")
        return ", ".join(parts) or "dense"

    def _log(self, text: str, *values: Any) -> None:
        logger.info(f"%s: {text}", self._model, *values)

    def _log_change(self, plan: RowPlan, needed: Needed) -> None:
        total = needed.read.numel()
        lines = [f"  {'rows':<22} {'number':>9} {'share':>7}"]
        counts = {"all": total, "needed": needed.num_attended, "read by the outputs": needed.num_read}
        lines += [f"  {n:<22} {c:>9} {100 * c / total:>5.0f} %" for n, c in counts.items()]
        if needed.labels is not None:
            lines.append(f"  {'labels not ignored':<22} {'':>9} {100 * needed.labels:>5.0f} %")
        share = self.density.share(plan, needed.num_read / total, needed.num_attended / total)
        self._log(
            "steps leave out %s, and compute %.0f %% of the dense step\n%s",
            self._name(plan) if plan else "nothing",
            100 * share,
            "\n".join(lines),
        )
