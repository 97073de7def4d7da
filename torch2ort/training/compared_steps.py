"""The first step of a packed graph, compared with the step that computes all rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch2ort.support.startup_timing import FIRST_RUN, Startup
from torch2ort.training.engine import Engine

# Differences that rounding explains, relative to the largest number of a tensor, and of all gradients: the
# gradient of a bias of attention's keys is 0 besides rounding.
_RELATIVE, _OF_ALL = 1e-4, 1e-6
# In low precision, steps of the dtype's resolution.
_ROUNDINGS = 8


@dataclass
class _State:
    """States of both forwards; :attr:`packed` is ``None`` if they differ."""

    dense: Any
    packed: Any


class ComparedEngine:
    """An engine for one step: it runs the packed and the dense graph, and returns equal results.

    Where the results differ, those of the dense graph are returned.

    Args:
        dense: the engine of the dense graph.
        packed: the engine of the packed graph.
        added: positions of the feeds that only the packed graph has.
        startup: receives the time of the step.
        finish: receives the difference, or an empty text.
    """

    def __init__(
        self, dense: Engine, packed: Engine, added: range, startup: Startup, finish: Callable[[str], None]
    ) -> None:
        self._dense, self._packed, self._added = dense, packed, added
        self._startup, self._finish = startup, finish

    def __getattr__(self, name: str) -> Any:
        return getattr(self._packed, name)

    @property
    def differentiable(self) -> tuple[int, ...]:
        """As that of the dense engine."""
        return self._dense.differentiable

    def forward(self, feeds: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], _State]:
        """Run both forward halves with the same random numbers; see :meth:`Engine.forward`."""
        with self._startup.recording(FIRST_RUN):
            return self._forward(feeds)

    def _forward(self, feeds: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], _State]:
        given = [feed for i, feed in enumerate(feeds) if i not in self._added]
        before = _generators()
        outputs, state = self._dense.forward(given)
        after = _generators()
        _restore(before)
        found, packed = self._packed.forward(feeds)
        drawn = _generators()
        difference = "it draws other random numbers"
        if all(torch.equal(one, other) for one, other in zip(after, drawn, strict=True)):
            difference = _difference(found, outputs, [f"output {i}" for i in range(len(outputs))])
        if difference:
            _restore(after)
            self._finish(difference)
            return outputs, _State(state, None)
        return found, _State(state, packed)

    def backward(
        self, state: _State, gradients: Sequence[torch.Tensor | None], *, keep: bool
    ) -> list[torch.Tensor | None]:
        """Run both backward halves; see :meth:`Engine.backward`."""
        with self._startup.recording(FIRST_RUN):
            found = self._backward(state, gradients, keep=keep)
        self._startup.log()
        return found

    def _backward(
        self, state: _State, gradients: Sequence[torch.Tensor | None], *, keep: bool
    ) -> list[torch.Tensor | None]:
        expected = self._dense.backward(state.dense, gradients, keep=keep)
        start = self._added.start
        given = [*expected[:start], *([None] * len(self._added)), *expected[start:]]
        if state.packed is None:
            return given
        found = self._packed.backward(state.packed, gradients, keep=keep)
        names = [f"the gradient of {name!r}" for name in self._packed.feed_names]
        difference = _difference(found, given, names)
        self._finish(difference)
        return given if difference else found


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
        allowed = max(_RELATIVE, _ROUNDINGS * resolution) * _largest(other) + _OF_ALL * largest
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
