"""PyTorch's switches that a call finds set, and that a graph is made under.

What ``forward`` computes may depend on them (``torch.is_grad_enabled()``, ``h.requires_grad``,
``ctx.needs_input_grad``), so a graph serves calls under the switches that it was traced under, and no other.
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
from torch2ort.pythonop.autocast import Autocast, entered, settings


class Modes(NamedTuple):
    """The switches of one call.

    Attributes:
        gradients: whether autograd records.
        inference: whether inference mode is on.
        determinism: PyTorch's debug level of determinism: 0 off, 1 warns, 2 raises.
        autocast: what it is set to.
    """

    gradients: bool
    inference: bool
    determinism: int
    autocast: Autocast

    @classmethod
    def now(cls) -> Modes:
        """The switches of this thread; one object for all that are equal."""
        return _switches.now()

    @property
    def deterministic(self) -> bool:
        """Whether PyTorch was asked for deterministic algorithms."""
        return self.determinism > 0

    def description(self) -> str:
        """One text a value, for keys."""
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
    """The switches of ``modes``, in a way that lets torch.export work; as before afterwards.

    Tensors made in inference mode cannot be used for gradients later, and a trace leaves some for every call
    to come. So a trace runs outside of it; only the model's code is told that it is on.
    """
    with contextlib.ExitStack() as stack:
        if modes.inference:
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(modes.gradients))
        stack.enter_context(traced_inference_mode(modes.inference))
        stack.enter_context(entered(modes.autocast))
        yield


@contextlib.contextmanager
def same_grad_mode(model: torch.nn.Module) -> Iterator[None]:
    """Refuse a ``forward`` inside that leaves the grad mode as another one than it found.

    Raises:
        ExportError: it does; a graph would not.
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
