"""PyTorch's switches during a call, which a graph is made for.

The results of ``forward`` may depend on them (``torch.is_grad_enabled()``, ``h.requires_grad``,
``ctx.needs_input_grad``), so a graph is used only for calls under the switches that it was traced under.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from torch2ort._native import Switches
from torch2ort.capture.inference_mode import traced_inference_mode
from torch2ort.errors import ExportError
from torch2ort.pythonop.autocast import Autocast, autocast_context, settings


class Modes(NamedTuple):
    """The switches of one call.

    Attributes:
        gradients: True if autograd records.
        inference: True if inference mode is on.
        determinism: PyTorch's debug level of determinism: 0 off, 1 warns, 2 raises.
        autocast: state of autocast.
    """

    gradients: bool
    inference: bool
    determinism: int
    autocast: Autocast

    @classmethod
    def now(cls) -> Modes:
        """Return the switches of this thread; equal ones are one object."""
        return _switches.now()

    @property
    def deterministic(self) -> bool:
        """True if deterministic algorithms are switched on in PyTorch."""
        return self.determinism > 0

    def description(self) -> str:
        """Return a text that identifies the value, for keys."""
        return (
            f"gradients {self.gradients}, inference {self.inference}, determinism {self.determinism}, "
            f"autocast {self.autocast.description()}"
        )


@functools.cache
def _of(recording: bool, inference: bool, determinism: int, autocast: Autocast) -> Modes:
    return Modes(recording and not inference, inference, determinism, autocast)


_switches = Switches(
    (
        (torch.is_grad_enabled, ()),
        (torch.is_inference_mode_enabled, ()),
        (torch.get_deterministic_debug_mode, ()),
        (settings.now, ()),
    ),
    _of,
)


@contextlib.contextmanager
def traceable_modes(modes: Modes) -> Iterator[None]:
    """Enter the switches of ``modes``, in a way that lets torch.export work; restore them afterwards.

    Tensors made in inference mode cannot be used for gradients later, and a trace keeps some for later calls.
    So a trace runs outside of it; only the model's code sees it as on.
    """
    with contextlib.ExitStack() as stack:
        if modes.inference:
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(modes.gradients))
        stack.enter_context(traced_inference_mode(modes.inference))
        stack.enter_context(autocast_context(modes.autocast))
        yield


@contextlib.contextmanager
def same_grad_mode(model: torch.nn.Module) -> Iterator[None]:
    """Refuse a ``forward`` inside that ends with another grad mode than it started with.

    Raises:
        ExportError: ``forward`` changed the mode, which a graph would not do.
    """
    before = torch.is_grad_enabled()
    yield
    if torch.is_grad_enabled() != before:
        torch.set_grad_enabled(before)
        switched = "off" if before else "on"
        raise ExportError(
            f"{type(model).__name__}: forward switches gradients {switched} and leaves them so for the code "
            f"behind its call, which a graph cannot do. Use `with torch.set_grad_enabled({not before}):` "
            f"around the part that it is meant for"
        )
