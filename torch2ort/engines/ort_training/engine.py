"""Training session: onnxruntime-training's gradient graph over an exported graph.

ONNX Runtime runs the forward half up to the model's outputs, keeps the state, and runs the backward half
when autograd hands over the outputs' gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import onnx
import torch

from torch2ort.cache.store.shelf import Shelf
from torch2ort.engines.moving import MovingFeeds
from torch2ort.engines.ort_training.gradient_graph import (
    GradientGraph,
    build_gradient_graph,
    kept_gradient_graph,
    no_gradient,
)
from torch2ort.engines.ort_training.missing_gradients import Edge, Reach
from torch2ort.engines.saved import Saved
from torch2ort.engines.zeros import LEFT_OUT, refuse_nan
from torch2ort.errors import EngineError
from torch2ort.graph.graph import Graph
from torch2ort.graph.nodes import ancestors
from torch2ort.graph.stages import save_optimized, save_stage
from torch2ort.log import onnxruntime_severity
from torch2ort.options import Options
from torch2ort.providers import session_providers
from torch2ort.pythonop.native import native
from torch2ort.runtime import drop_model_bytes, onnxruntime, training_pybind
from torch2ort.runtime.binding import bind_sites, install_runners, rename_functions, reraise
from torch2ort.runtime.centering import disabled_optimizers
from torch2ort.runtime.determinism import name_undeterministic
from torch2ort.runtime.feeds import Feeds, as_fed
from torch2ort.runtime.optimized import run_as_it_is
from torch2ort.runtime.profiling import describe, profiled
from torch2ort.runtime.training_kernel.context_table import pool
from torch2ort.runtime.training_kernel.run_lock import contexts_in, python_op_lock
from torch2ort.runtime.values import bool_outputs, plain, to_capsule, to_tensors, to_value
from torch2ort.startup import SESSION, timed

_UNREAD = (
    "the loss does not read all outputs of the model, and the zeros in the place of the others' gradients "
    "went through an operator whose derivative is infinite. Return those detached, or only what the loss "
    "reads"
)


def session_settings(options: Options) -> Any:
    """Settings of a session that runs gradient graphs."""
    settings = onnxruntime().SessionOptions()
    settings.enable_mem_pattern = False
    # Buffers cross to PyTorch and back; their lifetime is the tensors', not the plan's.
    settings.enable_mem_reuse = False
    settings.log_severity_level = onnxruntime_severity()
    settings.intra_op_num_threads = options.intra_op_threads or torch.get_num_threads()
    settings.inter_op_num_threads = 1
    # Backward's branches, the gradients of weights, run as soon as they can, which frees activations early.
    # The default order leaves many of them, and what they read, to the end.
    settings.execution_order = onnxruntime().ExecutionOrder.MEMORY_EFFICIENT
    settings.use_deterministic_compute = options.deterministic
    # A pool that spins between operators takes the cores from PyTorch's threads, which the Functions and the
    # optimizer run on: with 2 threads on 2 cores a step took three times as long.
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Weights are inputs that every step changes: a packed copy would go stale.
    settings.add_session_config_entry("session.disable_prepacking", "1")
    return settings


@timed(SESSION)
def _session(graph: Graph, gradient: GradientGraph, functions: Mapping[str, str], options: Options) -> Any:
    name_undeterministic(graph.proto.graph, graph.sites, options)
    if options.deterministic:
        # Behind the exported one, whose nodes have lines: it has the operators of backward, too.
        name_undeterministic(onnx.load_from_string(gradient.model).graph, graph.sites, options)
    describe(graph.proto.graph, graph.sites, gradient.chains)
    settings = session_settings(options)
    if gradient.optimized:
        run_as_it_is(settings)
    model = rename_functions(gradient.model, functions)
    save_stage(options, "gradient", model)
    save_optimized(options, "optimized", settings)
    try:
        with profiled(settings) as made:
            made.append(
                onnxruntime().InferenceSession(
                    model,
                    settings,
                    providers=session_providers(options.providers),
                    disabled_optimizers=disabled_optimizers(settings),
                )
            )
        return made[0]
    except Exception as error:
        raise no_gradient(error) from error


@dataclass(slots=True)
class ForwardState:
    """What one forward leaves for its backward.

    Attributes:
        partial: ONNX Runtime's state between the two halves of the graph; ``None`` once a backward has used
            it up.
        run: contexts of the Functions.
        outputs: shape, dtype and device of each fetched output, for the gradients that are missing.
        epoch: of the pool that onnxruntime keeps its own contexts in.
        random_state: PyTorch's, before the run, if it draws.
    """

    partial: Any
    run: native.Run
    outputs: list[tuple[torch.Size, torch.dtype, torch.device]]
    epoch: int
    random_state: torch.Tensor | None


class _Reached(NamedTuple):
    """What the gradients of some outputs reach, as far as no Function's backward returns ``None``.

    Attributes:
        whole: whether the Functions get the same gradients as from all outputs.
        makes_zeros_felt: see :meth:`Reach.makes_zeros_felt`.
        places: per feed, where its gradient is among those computed; ``None`` where none reaches it.
    """

    whole: bool
    makes_zeros_felt: bool
    places: list[int | None]


class TrainingEngine:
    """Gradient graph and session for one graph and one set of tensors that require gradients.

    Args:
        graph: the exported graph.
        requires_grad: the graph inputs (model inputs and weights) that require gradients.
        options: threads and debugging.
        shelf: where the gradient graph is kept for the next process.

    Attributes:
        differentiable: positions of the fetched outputs that depend on a tensor that requires gradients.
        needed: positions of the feeds that the backward half reads, so that they must not change
            between forward and backward.
        read_outputs: positions of the fetched outputs whose memory the backward half reads.
        copied: positions of the feeds that the model itself writes to and that its outputs depend on: what
            forward and backward read is a copy from before.
        weights: names of the tensors that are fed behind the model's inputs.

    Raises:
        RuntimeNotFoundError: no training build of onnxruntime is installed.
        UnsupportedOperatorError: the engine has no gradient or kernel for an operator.
    """

    def __init__(
        self, graph: Graph, requires_grad: frozenset[str], options: Options, shelf: Shelf | None = None
    ) -> None:
        self._ort = training_pybind()
        self._graph, self._options, self._shelf = graph, options, shelf
        self._reach = Reach(graph)
        # By the names of the outputs that have a gradient.
        self._reached: dict[tuple[str, ...], _Reached] = {}
        # The builder refuses tensors that no output depends on.
        requires_grad &= self._reach.inputs(graph.outputs)
        self._requires_grad = requires_grad
        self.differentiable = tuple(
            i
            for i, name in enumerate(graph.fetches)
            if i < len(graph.outputs) and self._reach.inputs([name]) & requires_grad
        )
        self.copied, self._read = _copied_and_read(graph)
        self.weights = tuple(graph.weights.values())
        self.moving = MovingFeeds()
        self._feeds = Feeds(len(graph.inputs))
        self._fetches = graph.fetches
        self._bools = bool_outputs(graph.proto.graph, graph.fetches)
        self._lock: Any = python_op_lock if graph.sites else contextlib.nullcontext()
        self._uses_rng = graph.uses_rng
        install_runners()
        if shelf is None:
            gradient = build_gradient_graph(graph, requires_grad)
        else:
            gradient = kept_gradient_graph(graph, requires_grad, session_settings(options), options, shelf)
        # onnxruntime knows by name what nodes call; here it lives.
        self._bound = bind_sites(graph.sites, gradient.plans, gradient.chains, training=True)
        self._site_nodes = {site.key: name for name, site in self._bound.sites.items()}
        # What the model writes to and no output depends on, no gradient depends on either.
        relevant = {*self.copied, *self._read}
        self.needed = tuple(i for i in gradient.needed if i in relevant)
        position = {name: i for i, name in enumerate(graph.feeds)}
        self.read_outputs = gradient.read_outputs
        # Positions of the outputs that are memory of a feed or of another output, once a run has shown it.
        self._shared: tuple[int, ...] | None = None
        self._feed_order = [(position[name], is_copy) for name, is_copy in gradient.sources]
        self._skipped = set(gradient.skipped)
        self._gradient_of = gradient.gradient_of
        self._session = _session(graph, gradient, self._bound.functions, options)
        drop_model_bytes(self._session)
        device = self._ort.OrtDevice(self._ort.OrtDevice.cpu(), self._ort.OrtDevice.default_memory(), 0)
        self._agent = self._ort.TrainingAgent(
            self._session._sess,
            list(gradient.feeds),
            [device] * gradient.fetched,
            list(gradient.gradients),
            [device] * len(gradient.gradients),
            0,
        )

    def anew(self) -> TrainingEngine:
        """See :class:`torch2ort.engines.interface.Engine`."""
        return TrainingEngine(self._graph, self._requires_grad, self._options, self._shelf)

    def forward(self, feeds: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], ForwardState]:
        """Run the forward half.

        Args:
            feeds: one tensor per entry of ``graph.feeds``.

        Returns:
            One tensor per entry of ``graph.fetches``, and the state for :meth:`backward`.

        Raises:
            EngineError: ONNX Runtime failed. An exception of a Function arrives as it is.
        """
        ort = self._ort
        random_state = torch.get_rng_state() if self._uses_rng else None
        made = self._feeds.values(feeds)
        values = ort.OrtValueVector()
        values.reserve(len(made))
        for index, is_copy in self._feed_order:
            values.push_back(to_value(as_fed(feeds[index]).clone()) if is_copy else made[index])
        fetched = ort.OrtValueVector()
        partial = ort.PartialGraphExecutionState()
        run = native.Run()
        with self._lock, contexts_in(run):
            if self._bound.callees:
                pool.tidy()
                pool.add(len(self._bound.callees))
            epoch = pool.epoch
            try:
                self._agent.run_forward(values, fetched, partial, None)
            except Exception as error:
                reraise(error)
        if self._shared is None:
            self._shared = _shared(made, fetched)
        outputs = to_tensors(fetched, self._bools)
        for index in self._shared:
            outputs[index] = outputs[index].clone()
        shapes = [(t.shape, t.dtype, t.device) for t in outputs]
        return outputs, ForwardState(partial, run, shapes, epoch, random_state)

    def backward(
        self, state: ForwardState, saved: Saved, gradients: Sequence[torch.Tensor | None], *, keep: bool
    ) -> list[torch.Tensor | None]:
        """Run the backward half, and before it forward again if its state is used up.

        Args:
            state: what :meth:`forward` left; ONNX Runtime's part of it serves once.
            saved: what forward was given.
            gradients: one per fetched output; ``None`` where the loss does not depend on it.
            keep: whether another backward may come.

        Returns:
            One entry per feed: its gradient, or ``None`` where autograd would give none.

        Raises:
            EngineError: ONNX Runtime failed, or forward cannot run again. An exception of a Function arrives
                as it is.
            RuntimeError: a tensor that forward would read again was written to since.
        """
        found = self._half(state, gradients)
        while found is None:
            found = self._half(self._again(state, saved), gradients)
        return found

    def _again(self, state: ForwardState, saved: Saved) -> ForwardState:
        """The state of a second run of forward, with the same random numbers.

        Raises:
            EngineError: it would write to what the first run wrote to, and may read what that left there.
            RuntimeError: a tensor that it reads was written to since.
        """
        if self._graph.remembering:
            raise EngineError(
                f"ORTModule: this backward must run forward again, for the state of the first run is used "
                f"up, and {self._graph.remembering}.forward writes to Python objects or tensors that it "
                f"finds there, which a second run would do again. Call the module again before each backward"
            )
        saved.check_feeds(self._read)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            if state.random_state is not None:
                torch.set_rng_state(state.random_state)
            return self.forward(saved.feeds)[1]

    def _half(
        self, state: ForwardState, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None] | None:
        """One entry per feed; ``None`` as a whole if onnxruntime has no state for it any more."""
        if state.partial is None:
            return None
        given = self._ort.OrtValueVector()
        names = []  # of the outputs that have a gradient
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                names.append(self._fetches[i])
            if i in self._skipped:
                continue
            if gradient is None:
                # The builder's backward breaks on a scalar zero: always the full shape.
                shape, dtype, device = state.outputs[i]
                gradient = torch.zeros(shape, dtype=dtype, device=device)
            given.push_back(to_capsule(plain(gradient)), False)
        computed = self._ort.OrtValueVector()
        run, outputs = state.run, tuple(names)
        reached = self._reached.get(outputs) or self._reached_from(outputs)
        run.partial = not reached.whole
        if self._site_nodes:
            run.arrivals = self._arrivals(run, outputs)
        with self._lock, contexts_in(state.run):
            if self._bound.callees and state.epoch != pool.epoch:
                return None
            try:
                self._agent.run_backward(given, computed, state.partial)
            except Exception as error:
                reraise(error)
            finally:
                state.partial = None
            if self._bound.callees:
                pool.add(-len(self._bound.callees))
        found = to_tensors(computed, ())  # a gradient is a number
        undefined, places = run.undefined, reached.places
        if undefined:
            places = self._places(self._reach.inputs(outputs, self._edges(undefined)))
        why = _UNREAD if reached.makes_zeros_felt else LEFT_OUT if undefined else ""
        run.arrivals = None
        run.clear()
        result = [None if place is None else found[place] for place in places]
        if why:
            refuse_nan(result, why)
        return result

    def _reached_from(self, outputs: tuple[str, ...]) -> _Reached:
        """What gradients of ``outputs`` reach, which serves every later backward of the same."""
        reach = self._reach
        found = self._reached[outputs] = _Reached(
            reach.is_whole(outputs), reach.makes_zeros_felt(outputs), self._places(reach.inputs(outputs))
        )
        return found

    def _places(self, reached: Collection[str]) -> list[int | None]:
        """Per feed, where its gradient is among those computed; ``None`` where none reaches it."""
        return [self._gradient_of.get(name) if name in reached else None for name in self._graph.feeds]

    def _arrivals(
        self, run: native.Run, outputs: tuple[str, ...]
    ) -> Callable[[str], tuple[bool, ...] | None]:
        return lambda site: self._reach.arrivals(self._site_nodes[site], outputs, self._edges(run.undefined))

    def _edges(self, undefined: Iterable[tuple[str, int]]) -> list[Edge]:
        return [(self._site_nodes[site], position) for site, position in undefined]


def _copied_and_read(graph: Graph) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Positions of the feeds that the model writes to and reads, and of those that it does not write to."""
    written = {m.target for m in graph.mutations}
    used = {name for node in graph.proto.graph.node for name in node.input} | set(graph.fetches)
    origins = [
        (i, origin)
        for i, origin in enumerate([*graph.inputs, *graph.weights.values()])
        if graph.feeds[i] in used
    ]
    relevant = ancestors(graph.proto.graph, graph.outputs) if written else set()
    copied = tuple(i for i, origin in origins if origin in written and graph.feeds[i] in relevant)
    return copied, tuple(i for i, origin in origins if origin not in written)


def _shared(feeds: Sequence[Any], fetched: Any) -> tuple[int, ...]:
    """Positions of the fetched values whose memory the caller has already, by a feed or another of them."""
    known = {value.data_ptr() for value in feeds}
    found = []
    for index in range(len(fetched)):
        address = fetched[index].data_ptr()
        if address in known and fetched[index].has_value():
            found.append(index)
        known.add(address)
    return tuple(found)
