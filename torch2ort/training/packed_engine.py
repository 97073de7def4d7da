"""The engine of a packed graph, with the interface of the dense graph's, and their comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch2ort.graph.accepted_sizes import compile_condition
from torch2ort.program.sparsity.inspection import Needed, index_inputs
from torch2ort.support.startup_timing import FIRST_RUN, Startup
from torch2ort.training.engine import Engine
from torch2ort.training.resharded_weights import MovingFeeds

# Differences that rounding explains, relative to the largest number of a tensor, and of all gradients: the
# gradient of a bias of attention's keys is 0 besides rounding.
_RELATIVE, _OF_ALL = 1e-4, 1e-6
# In low precision, steps of the dtype's resolution.
_ROUNDINGS = 8


class _Step:
    """The attributes of an engine that the autograd function of a model reads.

    Args:
        engine: the engine, or an object with these attributes.
    """

    differentiable: tuple[int, ...]
    read_outputs: tuple[int, ...]
    weights: tuple[str, ...]
    moved_feeds: MovingFeeds
    needed: tuple[int, ...]
    copied: tuple[int, ...]

    def __init__(self, engine: Engine | _Step) -> None:
        self.differentiable, self.read_outputs = engine.differentiable, engine.read_outputs
        self.weights, self.moved_feeds = engine.weights, engine.moved_feeds
        self.needed, self.copied = engine.needed, engine.copied


class PackedEngine(_Step):
    """An engine whose graph has inputs besides the dense graph's, which describe the rows of a call.

    Args:
        engine: the engine of the packed graph.
        inputs: the number of the dense graph's inputs.
        names: names of the additional inputs, which follow these.

    Attributes:
        engine: as given.
        inputs: as given.
    """

    def __init__(self, engine: Engine, inputs: int, names: Sequence[str]) -> None:
        super().__init__(engine)
        self.engine, self.inputs, self._names = engine, inputs, names
        self.needed, self.copied = self._of_dense(engine.needed), self._of_dense(engine.copied)
        self._conditions = [compile_condition(text) for text in engine.conditions]
        used = engine.used_feeds()
        self._used = frozenset(name for i, name in enumerate(names) if inputs + i in used)

    def _of_dense(self, feeds: Sequence[int]) -> tuple[int, ...]:
        """Return positions of feeds as those of the dense graph."""
        first, count = self.inputs, len(self._names)
        return tuple(i if i < first else i - count for i in feeds if i < first or i >= first + count)

    def with_new_sessions(self) -> PackedEngine:
        """Return the same engine with sessions of its own."""
        return PackedEngine(self.engine.with_new_sessions(), self.inputs, self._names)

    def step(self, needed: Needed, feeds: Sequence[torch.Tensor]) -> PackedStep | None:
        """Return the engine for one step; ``None`` if the graph is not valid for the call's sizes.

        Args:
            needed: the rows of the call.
            feeds: of the dense graph.
        """
        rows = index_inputs(self._names, self._used, needed)
        if self._conditions:
            shapes = [tensor.shape for tensor in (*feeds[: self.inputs], *rows)]
            if not all(holds(shapes) for holds in self._conditions):
                return None
        return PackedStep(self, rows)


class PackedStep(_Step):
    """One step of a packed graph; its methods and attributes are those of :class:`Engine`.

    Args:
        packed: the engine of the packed graph.
        rows: the additional inputs.
    """

    def __init__(self, packed: PackedEngine, rows: Sequence[torch.Tensor]) -> None:
        super().__init__(packed)
        self._engine, self._inputs, self._rows = packed.engine, packed.inputs, rows

    def forward(self, feeds: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """Run the forward half; see :meth:`Engine.forward`."""
        return self._engine.forward([*feeds[: self._inputs], *self._rows, *feeds[self._inputs :]])

    def backward(
        self, state: Any, gradients: Sequence[torch.Tensor | None], *, keep: bool
    ) -> list[torch.Tensor | None]:
        """Run the backward half; see :meth:`Engine.backward`."""
        found = self._engine.backward(state, gradients, keep=keep)
        return [*found[: self._inputs], *found[self._inputs + len(self._rows) :]]


@dataclass
class _States:
    """States of both forwards; that of the packed graph is ``None`` if their results differ."""

    dense: Any
    packed: Any


class ComparedStep(_Step):
    """A step that runs the packed and the dense graph, and returns equal results.

    Where results differ, those of the dense graph are returned.

    Args:
        dense: the engine of the dense graph.
        packed: the step of the packed graph.
        startup: receives the time of the step.
        finish: receives the difference, or an empty text.
    """

    def __init__(
        self, dense: Engine, packed: PackedStep, startup: Startup, finish: Callable[[str], None]
    ) -> None:
        super().__init__(dense)
        self._dense, self._packed = dense, packed
        self._startup, self._finish = startup, finish

    def forward(self, feeds: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], _States]:
        """Run both forward halves with the same random numbers; see :meth:`Engine.forward`."""
        with self._startup.recording(FIRST_RUN):
            before = _generators()
            outputs, state = self._dense.forward(feeds)
            after = _generators()
            _restore(before)
            try:
                found, packed = self._packed.forward(feeds)
                drawn = _generators()
                difference = "it draws other random numbers"
                if all(torch.equal(one, other) for one, other in zip(after, drawn, strict=True)):
                    difference = _difference(found, outputs, [f"output {i}" for i in range(len(outputs))])
            except Exception as error:
                # The dense step raised none.
                difference = f"its forward raises {error!r}"
            if difference:
                _restore(after)
                self._finish(difference)
                return outputs, _States(state, None)
            return found, _States(state, packed)

    def backward(
        self, state: _States, gradients: Sequence[torch.Tensor | None], *, keep: bool
    ) -> list[torch.Tensor | None]:
        """Run both backward halves; see :meth:`Engine.backward`."""
        with self._startup.recording(FIRST_RUN):
            expected = self._dense.backward(state.dense, gradients, keep=keep)
            if state.packed is None:
                return expected
            try:
                found = self._packed.backward(state.packed, gradients, keep=keep)
                names = [f"the gradient of {name!r}" for name in self._dense.feed_names]
                difference = _difference(found, expected, names)
            except Exception as error:
                difference = f"its backward raises {error!r}"
            self._finish(difference)
        self._startup.log()
        return expected if difference else found


def _difference(
    found: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None], names: Sequence[str]
) -> str:
    """Return the first difference that rounding does not explain; an empty text if there is none."""
    tensors = [t for t in expected if t is not None and t.is_floating_point() and t.numel()]
    largest = max((_largest(t) for t in tensors), default=0.0)
    for name, one, other in zip(names, found, expected, strict=True):
        if one is None or other is None:
            if one is not other:
                return f"{name} is None in one of them"
            continue
        if not other.is_floating_point():
            if not torch.equal(one, other):
                return f"{name} differs"
            continue
        resolution = torch.finfo(other.dtype).eps
        allowed = max(_RELATIVE, _ROUNDINGS * resolution) * _largest(other)
        allowed += max(_OF_ALL, resolution) * largest
        if not torch.equal(one.isfinite(), other.isfinite()):
            return f"{name} has other elements that are not finite"
        apart = _largest(one.detach().double() - other.detach().double())
        if apart > allowed:
            return f"{name} by {apart:.3g}, of at most {_largest(other):.3g}"
    return ""


def _largest(tensor: torch.Tensor) -> float:
    if not tensor.numel():
        return 0.0
    return float(torch.where(tensor.isfinite(), tensor.detach(), 0).abs().max())


def _generators() -> list[torch.Tensor]:
    found = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        found += torch.cuda.get_rng_state_all()
    return found


def _restore(states: Sequence[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(list(states[1:]))
