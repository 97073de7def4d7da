"""The engine for tensors on a GPU.

Forward and backward sessions share one stream with each other and with the Functions in them. Values that
backward reads stay in memory of ONNX Runtime; the caller gets outputs and gradients as copies in PyTorch's
memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import onnx
import torch

from torch2ort.cache.store.graph_entries import GraphEntries
from torch2ort.graph.lowered_graph import Lowered
from torch2ort.options import Options
from torch2ort.program.program import Program
from torch2ort.program.target import Target
from torch2ort.runtime.cuda import streams
from torch2ort.runtime.cuda.sessions import DeviceFeeds, DeviceRun, device_of, on_stream
from torch2ort.runtime.optimized_model import Optimization
from torch2ort.runtime.session import refuse_missing
from torch2ort.runtime.step_io import Passing, PythonSession
from torch2ort.runtime.step_session import Bindings, HalfSession, Source
from torch2ort.training.engine import Engine, ForwardState
from torch2ort.training.plan_cache import Plans


@contextlib.contextmanager
def _nothing_lent(session_options: Any) -> Iterator[bool]:
    """Replace the allocator that gives CPU sessions memory of PyTorch: on a device there is none."""
    yield False


class DevicePythonSession(PythonSession):
    """As its base, with values on a device; it must be called while the sessions' stream is entered."""

    def __init__(
        self,
        session: Any,
        inputs: Sequence[str],
        outputs: Sequence[str],
        passing: Passing,
        bools: frozenset[int],
        device: torch.device,
    ) -> None:
        on_it = tuple(s if isinstance(s, int) else s.to(device) for s in passing.sources)
        super().__init__(session, inputs, outputs, replace(passing, sources=on_it), bools)
        self._feeds = DeviceFeeds(device)
        self._run = DeviceRun(session, outputs, device)

    def _fetch(self, values: Sequence[Any]) -> Sequence[Any]:
        found: Sequence[Any] = self._run(self._inputs, values)
        return found


class DeviceHalf(HalfSession):
    """A session of one half of a step, whose inputs and outputs are on a device.

    No value is donated, and nodes run in ONNX Runtime's order: both would require to read the optimised model
    for a GPU again, which is untested.

    Args:
        name: as in the base class, like the others.
        lowered: the half.
        bindings: the Functions that its nodes call.
        options: threads, providers and debugging.
        passing: its feeds, and the use of its results.
        settings: the base class's other arguments.

    Raises:
        EngineError: ONNX Runtime left out a provider.
    """

    _lent_allocator = staticmethod(_nothing_lent)

    def __init__(
        self,
        name: str,
        lowered: Lowered,
        bindings: Bindings,
        options: Options,
        passing: Passing,
        **settings: Any,
    ) -> None:
        self._device = device_of(options.providers)
        self._stream = streams.stream_of(self._device)
        super().__init__(name, lowered, bindings, options, passing, **settings)

    def _providers(self) -> list[Any]:
        return on_stream(self._options.providers, self._stream)

    def _by_python(self, session: Any) -> PythonSession:
        # Without its libraries, ONNX Runtime falls back to the CPU with a line in its log.
        refuse_missing(session, self._providers())
        # Constants are copied to the device. A backward, whose session is created inside of a run, has none.
        constants = any(isinstance(source, torch.Tensor) for source in self.passing.sources)
        with self._stream.make_current() if constants else contextlib.nullcontext():
            return DevicePythonSession(
                session, self._fed, self._outputs, self.passing, self._bools, self._device
            )

    def _source(
        self, model: onnx.ModelProto, optimization: Optimization, graph_entries: GraphEntries | None
    ) -> Source:
        return super()._source(model, replace(optimization, frees_early=False), None)


class DeviceEngine(Engine):
    """As its base, for tensors on the device of the options' providers.

    Args:
        program: as in the base class, like the others.
        requires_grad: the graph inputs that require gradients.
        options: threads, providers and debugging.
        target: the target of graphs.
        plans: the plans of an engine with the same arguments.
    """

    _half_session: ClassVar[type[HalfSession]] = DeviceHalf

    def __init__(
        self,
        program: Program,
        requires_grad: frozenset[str],
        options: Options,
        target: Target,
        plans: Plans | None = None,
    ) -> None:
        device = device_of(options.providers)
        self._stream = streams.stream_of(device)
        super().__init__(program, requires_grad, options, target, plans)

    def forward(self, feeds: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], ForwardState]:
        """Run the forward half; see the base class."""
        with self._stream.make_current():
            outputs, state = super().forward(feeds)
        return self._stream.handed_over(outputs), state  # type: ignore[return-value]

    def backward(
        self, state: ForwardState, gradients: Sequence[torch.Tensor | None], *, keep: bool
    ) -> list[torch.Tensor | None]:
        """Run the backward half; see the base class."""
        with self._stream.make_current():
            found = super().backward(state, gradients, keep=keep)
        return self._stream.handed_over(found)
