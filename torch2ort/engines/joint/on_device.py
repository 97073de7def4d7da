"""The joint engine over tensors that are on a GPU.

Forward and backward sessions share one stream, and so do the Functions in them. What forward leaves for
backward stays in onnxruntime's memory; what the caller gets is a copy in PyTorch's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import onnx
import torch

from torch2ort.engines.joint.engine import JointEngine, JointState
from torch2ort.engines.joint.lowered import Lowered
from torch2ort.engines.joint.plans import Plans
from torch2ort.engines.joint.session import Bindings, HalfSession
from torch2ort.engines.saved import Saved
from torch2ort.errors import EngineError
from torch2ort.exports.built import Built
from torch2ort.options import Options
from torch2ort.pythonop.native import native
from torch2ort.runtime import stock
from torch2ort.runtime.cuda import streams
from torch2ort.runtime.cuda.sessions import DeviceFeeds, DeviceRun, device_of, on_stream
from torch2ort.runtime.session import refuse_missing
from torch2ort.runtime.training_kernel.run_lock import contexts_in
from torch2ort.runtime.values import plain, to_value
from torch2ort.symbolics.target import Target


@contextlib.contextmanager
def _nothing_lent(session_options: Any) -> Iterator[bool]:
    """In the place of the allocator that gives CPU sessions the memory of PyTorch's tensors."""
    yield False


class DeviceHalf(HalfSession):
    """Runs one half of a step, whose inputs and outputs are on a device.

    Nothing is donated, and nodes run in onnxruntime's order: for both it would have to read again what it
    optimised for a GPU, which nobody tried.

    Args:
        name: see the base, as for the others.
        lowered: the half.
        bindings: what its nodes call.
        options: threads, providers and debugging.
        settings: the base's other arguments.

    Raises:
        EngineError: onnxruntime went without a provider.
    """

    _lent_allocator = staticmethod(_nothing_lent)

    def __init__(
        self, name: str, lowered: Lowered, bindings: Bindings, options: Options, **settings: Any
    ) -> None:
        device = device_of(options.providers)
        self._stream = streams.stream_of(device)
        super().__init__(name, lowered, bindings, options, **settings)
        # Without its libraries onnxruntime runs on the CPU, and says so in a line.
        refuse_missing(self._session, self._providers())
        self._run = DeviceRun(self._session, lowered.outputs, device)

    def _providers(self) -> list[Any]:
        return on_stream(self._options.providers, self._stream)

    def _made(self, model: onnx.ModelProto, settings: Any, owned: Sequence[str], *, frees_early: bool) -> Any:
        return super()._made(model, settings, owned, frees_early=False)

    def run(self, values: Sequence[Any], run: native.Run) -> Sequence[Any]:
        """See the base; to be called while the sessions' stream is entered."""
        if not self._outputs:
            return ()
        failure: BaseException | None = None
        with contexts_in(run, without_grad=True):
            try:
                found: Sequence[Any] = self._run(self._fed, values)
                return found
            except Exception as error:
                failure = stock.take_error(error)
                if failure is None:
                    failure = EngineError(f"ONNX Runtime failed: {error}")
                    failure.__cause__ = error
        # Outside of the handler, which would make onnxruntime's error the context of the Function's.
        raise failure


class DeviceEngine(JointEngine):
    """As its base, for tensors that are on the device of the options' providers.

    Args:
        built: see the base, as for the others.
        requires_grad: the graph inputs that require gradients.
        options: threads, providers and debugging.
        target: what graphs are for.
        plans: those of an engine with the same arguments.
    """

    _half_session: ClassVar[type[HalfSession]] = DeviceHalf

    def __init__(
        self,
        built: Built,
        requires_grad: frozenset[str],
        options: Options,
        target: Target,
        plans: Plans | None = None,
    ) -> None:
        device = device_of(options.providers)
        self._stream = streams.stream_of(device)
        super().__init__(built, requires_grad, options, target, plans)
        self._feeds = DeviceFeeds(device)  # type: ignore[assignment]
        with self._stream.entered():
            self._sources = [
                s if isinstance(s, int) else to_value(plain(s.value).to(device)) for s in self._plan.sources
            ]

    def forward(self, feeds: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], JointState]:
        """See :class:`torch2ort.engines.interface.Engine`."""
        with self._stream.entered():
            outputs, state = super().forward(feeds)
        return self._stream.handed_over(outputs), state  # type: ignore[return-value]

    def backward(
        self, state: JointState, saved: Saved, gradients: Sequence[torch.Tensor | None], *, keep: bool
    ) -> list[torch.Tensor | None]:
        """See :class:`torch2ort.engines.interface.Engine`."""
        with self._stream.entered():
            found = super().backward(state, saved, gradients, keep=keep)
        return self._stream.handed_over(found)
