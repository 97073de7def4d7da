"""Training of a graph by two sessions of any onnxruntime: forward, and the backward that autograd derived."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from torch2ort.cache.key.export_lock import exclusive
from torch2ort.differentiate.grad_reachability import Edge
from torch2ort.log import suppress_libraries
from torch2ort.options import Options
from torch2ort.program.program import Program
from torch2ort.program.target import Target
from torch2ort.pythonop.native import native
from torch2ort.runtime.native_sites import OriginalFeeds, original_feeds
from torch2ort.runtime.profiling import active_tracer
from torch2ort.runtime.step_io import Passing
from torch2ort.runtime.step_session import Bindings, HalfSession
from torch2ort.support.startup_timing import DIFFERENTIATE, FIRST_RUN, current, phase
from torch2ort.training.plan_cache import Plans
from torch2ort.training.resharded_weights import MovingFeeds
from torch2ort.training.step_plan import BackwardPlan, ForwardPlan
from torch2ort.training.undefined_grads import LEFT_OUT, refuse_nan


@dataclass(slots=True)
class ForwardState:
    """State of one forward for its backward.

    Attributes:
        kept: the values that backward is fed with, in the order of the split; ``None`` after the last
            backward.
        run: contexts of the Functions, and the values that backward owns.
    """

    kept: Any
    run: native.Run


@dataclass(frozen=True)
class _Backward:
    """The backward for one set of outputs that have a gradient.

    Attributes:
        plan: its plan.
        session: its session; ``None`` if it computes nothing.
        gradients: the result of :meth:`Engine._reached_feeds` for a run in which no Function's backward
            returns ``None``.
    """

    plan: BackwardPlan
    session: HalfSession | None
    gradients: list[tuple[int, int, bool]]


class Engine:
    """Forward and backward sessions of one graph and one set of tensors that require gradients.

    Args:
        program: the program.
        requires_grad: the graph inputs (model inputs and weights) that require gradients.
        options: threads and debugging.
        target: the target of graphs.
        plans: the plans of an engine with the same arguments.

    Attributes:
        differentiable: positions of the fetched outputs that depend on a tensor that requires gradients.
        needed: positions of the feeds whose memory eager PyTorch's backward would read; it must not change
            between forward and backward.
        read_outputs: positions of the fetched outputs whose memory eager PyTorch's backward would read.
        copied: positions of the feeds that the model itself writes to and that backward reads: backward reads
            a copy that is made before the write.
        weights: names of the tensors that are fed after the model's inputs.
        moved_feeds: detects feeds whose memory in backward differs from that in forward.

    Raises:
        UnsupportedOperatorError: the engine does not support an operator of the program.
    """

    # Replaced by engines for tensors on another device than the CPU.
    _half_session: ClassVar[type[HalfSession]] = HalfSession

    def __init__(
        self,
        program: Program,
        requires_grad: frozenset[str],
        options: Options,
        target: Target,
        plans: Plans | None = None,
    ) -> None:
        self._signature, self._options = program.signature, options
        self._made_of = (program, requires_grad, options, target)
        self._startup = current()
        self._tracer = active_tracer()
        self._plans = plans or Plans(program, requires_grad, options, target)
        plan = self._plans.forward
        self._plan = plan
        fed = {
            name: source
            for name, source in zip(plan.lowered.inputs, plan.sources, strict=True)
            if isinstance(source, int)
        }
        originals = original_feeds(plan.lowered.proto.graph, plan.lowered.calls, fed)
        self._has_originals = bool(originals)
        self._bindings = Bindings(options.providers)
        self._bindings.set_originals(originals)
        self._forward = self._half_session(
            "forward",
            plan.lowered,
            self._bindings,
            options,
            Passing(
                tuple(s if isinstance(s, int) else s.value for s in plan.sources),
                len(self._signature.inputs),
                tuple(plan.fetched),
                tuple(plan.kept),
                tuple(plan.donated),
            ),
            readable=self._names_of_inputs(),
            graph_entries=self._plans.graph_entries,
        )
        self._saved_feeds = _saved_by_functions(plan, fed, originals)
        self._feed_count = len(self._signature.feeds)
        self._nodes = {site.key: node for node, site in plan.lowered.calls.items()}
        self._backwards: dict[frozenset[int], _Backward] = {}
        written = set(plan.written)
        self.differentiable = tuple(sorted(plan.tangents))
        self.needed = plan.needed
        self.read_outputs = plan.read_outputs
        self.conditions = plan.conditions
        self.copied = tuple(i for i in plan.needed if i in written)
        self.weights = tuple(self._signature.weights.values())
        self.moved_feeds = MovingFeeds()
        if self._startup is not None:
            self._startup.awaits_other_half = True

    def with_new_sessions(self) -> Engine:
        """Return the same engine with sessions of its own."""
        return type(self)(*self._made_of, self._plans)

    def used_feeds(self) -> frozenset[int]:
        """Return positions of the feeds that forward reads, or passes to backward."""
        return frozenset(source for source in self._plan.sources if isinstance(source, int))

    @property
    def feed_names(self) -> tuple[str, ...]:
        """Names of the feeds."""
        return self._signature.feeds

    def forward(self, feeds: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], ForwardState]:
        """Run the forward half.

        Args:
            feeds: the model's inputs, then its weights.

        Returns:
            The fetched outputs, and the state for :meth:`backward`.

        Raises:
            EngineError: ONNX Runtime failed. An exception of a Function is raised unchanged.
        """
        run = native.Run()
        if self._saved_feeds:
            # New tensors over the same memory, as the caller's may get other memory by `tensor.data = ...`.
            run.feed([feeds[i].detach() for i in self._saved_feeds])
        if self._has_originals:
            run.originals = tuple(feeds)
        outputs, kept = self._forward.run(None, feeds, run)
        run.originals = None
        return outputs, ForwardState(kept, run)

    def backward(
        self, state: ForwardState, gradients: Sequence[torch.Tensor | None], *, keep: bool
    ) -> list[torch.Tensor | None]:
        """Run the backward half.

        Args:
            state: the result of :meth:`forward`.
            gradients: one per fetched output; ``None`` where the loss does not depend on it.
            keep: whether another backward of this state may follow.

        Returns:
            One entry per feed: its gradient, or ``None`` where autograd would return none.

        Raises:
            EngineError: ONNX Runtime failed. An exception of a Function is raised unchanged.
        """
        missing = frozenset([i for i in self._plan.tangents if gradients[i] is None])
        known = self._backwards.get(missing)
        if known is not None:
            return self._run_backward(known, state, gradients, keep=keep)
        with contextlib.nullcontext() if self._startup is None else self._startup.recording(FIRST_RUN):
            found = self._run_backward(self._build_backward(missing), state, gradients, keep=keep)
        if self._startup is not None:
            self._startup.log()
        return found

    def _run_backward(
        self,
        backward: _Backward,
        state: ForwardState,
        gradients: Sequence[torch.Tensor | None],
        *,
        keep: bool,
    ) -> list[torch.Tensor | None]:
        """Run a backward half and return one entry per feed; see :meth:`backward`."""
        plan = backward.plan
        run = state.run
        run.keeps = keep
        run.undefined.clear()
        run.arrivals = lambda site: self._plan.reach.defined_output_gradients(
            self._call(site), plan.given, [(self._call(key), argument) for key, argument in run.undefined]
        )
        kept = state.kept
        if not keep:
            state.kept = None
        tensors: list[torch.Tensor] = []
        if backward.session is not None:
            given: list[Any] = [gradients[i] for i in plan.given]
            tensors, _ = backward.session.run(kept, given, run)
        del kept
        undefined = [(self._call(site), argument) for site, argument in run.undefined]
        run.arrivals = None
        if not keep:
            run.clear()
        found: list[torch.Tensor | None] = [None] * self._feed_count
        reached = self._reached_feeds(plan, undefined) if undefined else backward.gradients
        for feed, position, again in reached:
            # Two tensors with one gradient must not share its memory: each may be written to.
            found[feed] = tensors[position].clone() if again else tensors[position]
        if undefined:
            refuse_nan(found, LEFT_OUT)
        return found

    def _reached_feeds(self, plan: BackwardPlan, undefined: Collection[Edge]) -> list[tuple[int, int, bool]]:
        """Return the feeds that a gradient reaches.

        Args:
            plan: the plan of the backward.
            undefined: arguments for which a Function's backward returned ``None``.

        Returns:
            Position of the feed, position of its gradient among the half's outputs, and whether an earlier
            feed has the same gradient.
        """
        reached = self._plan.reach.inputs(plan.given, undefined)
        pairs = [(feed, position) for feed, position in plan.gradients.items() if feed in reached]
        first = {position: feed for feed, position in reversed(pairs)}
        return [(feed, position, first[position] != feed) for feed, position in pairs]

    def _names_of_inputs(self) -> dict[str, str]:
        """Return the names of the forward half's inputs for messages."""
        pairs = zip(self._plan.lowered.inputs, self._plan.sources, strict=True)
        return {name: self._signature.feeds[source] for name, source in pairs if isinstance(source, int)}

    def _names_in_backward(self, plan: BackwardPlan) -> dict[str, str]:
        """Return the names of a backward half's inputs and outputs for messages."""
        assert plan.lowered is not None
        lowered, signature, inputs = self._plan.lowered, self._signature, self._names_of_inputs()
        kept = [lowered.outputs[i] if i >= 0 else lowered.inputs[~i] for i in self._plan.kept]
        given = [f"grad_{signature.fetches[i]}" for i in plan.given]
        names = dict(zip(plan.lowered.inputs, [*(inputs.get(k, k) for k in kept), *given], strict=True))
        return {
            **names,
            **{plan.lowered.outputs[i]: f"grad_{signature.feeds[f]}" for f, i in plan.gradients.items()},
        }

    def _call(self, native_key: str) -> str:
        """Return the name of the call that a native site represents."""
        return self._nodes[self._bindings.names[native_key]]

    @exclusive.looking()
    def _build_backward(self, missing: frozenset[int]) -> _Backward:
        """Build the backward without the gradients of some outputs."""
        if missing in self._backwards:
            return self._backwards[missing]  # another thread built it while this one waited
        tracing = contextlib.nullcontext() if self._tracer is None else self._tracer.tracing()
        with phase(DIFFERENTIATE), suppress_libraries(), tracing:
            plan = self._plans.backward(missing)
            session = None
            if plan.lowered is not None:
                session = self._half_session(
                    "backward",
                    plan.lowered,
                    self._bindings,
                    self._options,
                    Passing.through(len(plan.given), len(plan.lowered.outputs)),
                    frees_early=True,
                    donated=self._forward.passing.donated,
                    readable=self._names_in_backward(plan),
                    graph_entries=self._plans.graph_entries,
                )
        known = self._backwards[missing] = _Backward(plan, session, self._reached_feeds(plan, ()))
        return known


def _saved_by_functions(
    plan: ForwardPlan, fed: Mapping[str, int], originals: OriginalFeeds
) -> tuple[int, ...]:
    """Return positions of the feeds whose memory Functions save; a write to such a feed is an error.

    Args:
        plan: the plan of the forward half.
        fed: input of the half -> position of its feed.
        originals: arguments for which Functions get the fed tensor itself, by the key of the site.
    """
    kept = set()
    for node in plan.lowered.proto.graph.node:
        site = plan.lowered.calls.get(node.name)
        if site is None or not any(site.needs_input_grad):
            continue
        given = originals.get(site.key, {})
        for name, argument in zip(node.input, site.tensor_positions, strict=True):
            if argument in site.known_result.kept and name in fed and argument not in given:
                kept.add(fed[name])
    return tuple(i for i in plan.needed if i in kept)
