"""Trains a graph by two sessions of any onnxruntime: forward, and backward as autograd differentiated it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torch2ort.engines.joint.lower import lower_half
from torch2ort.engines.joint.memory import ReadMemory
from torch2ort.engines.joint.session import Bindings, HalfSession
from torch2ort.engines.joint.split import Split
from torch2ort.engines.joint.target import half_of
from torch2ort.engines.joint.trace import Joint, refuse_write, trace_joint
from torch2ort.engines.saved import Saved
from torch2ort.exports.built import Built
from torch2ort.exports.source import Source
from torch2ort.graph.graph import Graph
from torch2ort.options import Options
from torch2ort.pythonop.native import native
from torch2ort.runtime.feeds import Feeds
from torch2ort.runtime.values import bool_outputs, plain, restore_bools, to_tensor, to_value
from torch2ort.symbolics.target import Target


@dataclass(slots=True)
class JointState:
    """What one forward leaves for its backward.

    Attributes:
        kept: values that backward reads, in the order of the split.
        run: contexts of the Functions.
    """

    kept: list[Any]
    run: native.Run = field(default_factory=native.Run)


@dataclass(frozen=True)
class _Backward:
    """The backward for one set of outputs that have a gradient.

    Attributes:
        session: runs it; ``None`` if it computes nothing.
        given: positions of the outputs whose gradients it takes.
        gradients: position of a feed -> position among the session's outputs.
    """

    session: HalfSession | None
    given: tuple[int, ...]
    gradients: dict[int, int]


class JointEngine:
    """Forward and backward session for one graph and one set of tensors that require gradients.

    Args:
        built: the graph, with the program behind it.
        requires_grad: the graph inputs (model inputs and weights) that require gradients.
        options: threads and debugging.
        target: what graphs are for.

    Attributes:
        differentiable, needed, read_outputs, copied, weights: see
            :class:`torch2ort.engines.interface.Engine`.

    Raises:
        UnsupportedOperatorError: the program has something that the engine does not take.
    """

    def __init__(self, built: Built, requires_grad: frozenset[str], options: Options, target: Target) -> None:
        graph, source = built.graph, built.source
        assert source is not None
        self._graph, self._options, self._target = graph, options, half_of(target)
        required = [isinstance(feed, str) and feed in requires_grad for feed in source.feeds]
        joint = trace_joint(source, required)
        self._joint, self._split = joint, Split(joint)
        self._fetched = (*joint.outputs, *_written(graph, source, joint, requires_grad))
        position = {name: i for i, name in enumerate(graph.feeds)}
        # Of each input of the program: the feed's position, or the constant's value.
        self._sources = [
            position[feed] if isinstance(feed, str) else to_value(plain(feed)) for feed in source.feeds
        ]
        half = self._split.forward()
        self._placeholders = [self._sources[joint.inputs[node]] for node in half.inputs]
        self._positions = {node: i for i, node in enumerate(half.outputs)}
        self._bindings = Bindings()
        lowered = lower_half(half, self._target)
        self._forward = HalfSession("forward", lowered, self._bindings, options)
        self._feeds = Feeds(len(graph.inputs))
        self._outputs = [self._positions[node] for node in self._fetched]
        self._bools = bool_outputs(lowered.proto.graph, [lowered.outputs[i] for i in self._outputs])
        self._backwards: dict[frozenset[int], _Backward] = {}
        self._tangents = tuple(joint.tangents.values())
        self.differentiable = tuple(sorted(self._tangents))
        memory = ReadMemory(joint, self._split.kept)
        read = {self._sources[i] for i in memory.inputs}
        written = {self._sources[i] for i in joint.written}
        self.needed = tuple(sorted(i for i in read if isinstance(i, int)))
        self.read_outputs = tuple(i for i in range(len(joint.outputs)) if memory.has_output(i))
        self.copied = tuple(i for i in self.needed if i in written)
        self.weights = tuple(graph.weights.values())

    def forward(self, feeds: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], JointState]:
        """See :class:`torch2ort.engines.interface.Engine`."""
        made = self._feeds.values(feeds)
        given = [made[source] if isinstance(source, int) else source for source in self._placeholders]
        state = JointState([])
        results = self._forward.run(given, state.run)
        outputs = [to_tensor(results[i]) for i in self._outputs]
        restore_bools(outputs, self._bools)
        values = dict(zip(self._joint.inputs, given, strict=True))
        state.kept = [
            results[self._positions[node]] if node in self._positions else values[node]
            for node in self._split.kept
        ]
        return outputs, state

    def backward(
        self, state: JointState, saved: Saved, gradients: Sequence[torch.Tensor | None], *, keep: bool
    ) -> list[torch.Tensor | None]:
        """See :class:`torch2ort.engines.interface.Engine`."""
        missing = frozenset(i for i in self._tangents if gradients[i] is None)
        backward = self._backward(missing)
        values = [*state.kept, *(to_value(plain(gradients[i])) for i in backward.given)]  # type: ignore[arg-type]
        run = state.run
        run.keeps = keep
        run.undefined.clear()
        run.unmaterialized.clear()
        if not keep:
            state.kept = []
        results = () if backward.session is None else backward.session.run(values, run)
        del values
        names = self._bindings.names
        undefined = [(names[site], argument) for site, argument in run.undefined]
        reached = self._joint.reach.inputs(
            backward.given, undefined, {names[site] for site in run.unmaterialized} if undefined else ()
        )
        if not keep:
            run.clear()
        made: dict[int, torch.Tensor] = {}
        found: list[torch.Tensor | None] = [None] * len(self._graph.feeds)
        for program_input, position in backward.gradients.items():
            feed = self._sources[program_input]
            if program_input in reached and isinstance(feed, int):
                # Two tensors that get one gradient must not share its memory: each may be written to.
                again = position in made
                found[feed] = made[position].clone() if again else to_tensor(results[position])
                made[position] = found[feed]  # type: ignore[assignment]
        return found

    def _backward(self, missing: frozenset[int]) -> _Backward:
        known = self._backwards.get(missing)
        if known is None:
            half, gradients = self._split.backward(missing)
            session = None
            if half.outputs:
                lowered = lower_half(half, self._target)
                session = HalfSession("backward", lowered, self._bindings, self._options)
            where = {node: i for i, node in enumerate(half.outputs)}
            given = tuple(i for i in self._tangents if i not in missing)
            known = _Backward(session, given, {i: where[node] for i, node in gradients.items()})
            self._backwards[missing] = known
        return known


def _written(
    graph: Graph, source: Source, joint: Joint, requires_grad: frozenset[str]
) -> list[torch.fx.Node]:
    """The new value of each tensor that forward writes to, in the order of the graph's mutations.

    Raises:
        UnsupportedOperatorError: it writes to what the graph knows of no write to, or to what requires a
            gradient.
    """
    written = {source.feeds[i]: node for i, node in joint.written.items() if isinstance(source.feeds[i], str)}
    names = {origin: name for name, origin in graph.weights.items()}
    found = {}
    for mutation in graph.mutations:
        name = names.get(mutation.target, "") if mutation.kind == "buffer" else mutation.target
        if name not in written or name in requires_grad:
            refuse_write(mutation.target)
        found[name] = written[name]
    for feed in (source.feeds[i] for i in joint.written):
        if not isinstance(feed, str) or feed not in found:
            refuse_write(feed)
    return list(found.values())
