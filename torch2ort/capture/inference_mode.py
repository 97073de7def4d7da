"""Inference mode while a model is traced.

A trace does not record it, so computations of the model inside of it would be differentiated. Autograd treats
such a part like one under ``torch.no_grad()``, which a trace records.

If the whole call is inside of it, the trace is outside, and the model's code sees the modes of the call.
There PyTorch records nothing for a backward, independently of the grad mode: where the code switches
gradients on, it only sees the mode as on.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch2ort._torch import global_state as private
from torch2ort.support.replaced import replaced

# Eager PyTorch's message.
_UNWRITABLE = (
    "Inplace update to inference tensor outside InferenceMode is not allowed.You can make a clone to get a "
    "normal tensor before doing inplace update.See https://github.com/pytorch/rfcs/pull/17 for more details."
)
# Functions that are in-place by their names alone.
_NO_WRITES = frozenset({"requires_grad_", "detach_", "rename_"})
_DETACHES = (torch.Tensor.detach, torch.detach)


class InferenceTensors:
    """Tensors that inference mode made in a trace, and that must not be written to outside of it.

    A trace refuses writes to whole tensors alone.
    """

    def __init__(self) -> None:
        # By their ids; this dictionary keeps them alive for as long as the ids are used.
        self._detached: dict[int, torch.Tensor] = {}

    def refuse_write(self, function: Any, arguments: tuple[Any, ...]) -> None:
        """Refuse a write that eager PyTorch refuses.

        Args:
            function: the function of torch that is about to be called.
            arguments: its positional arguments.

        Raises:
            RuntimeError: the function writes to a tensor made in inference mode, outside of that mode.
        """
        name = getattr(function, "__name__", "")
        is_entry = name == "__setitem__"
        writes = is_entry or (name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES)
        if not writes or not arguments or not isinstance(arguments[0], torch.Tensor):
            return
        # An entry selected by a number is a view, which is then written to.
        is_whole = not is_entry or isinstance(arguments[1], (torch.Tensor, list))
        if is_whole and id(arguments[0]) in self._detached:
            return
        if arguments[0].is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError(_UNWRITABLE)

    def note(self, function: Any, result: Any) -> None:
        """Record a detached alias, which eager PyTorch allows to be written to as a whole."""
        if function in _DETACHES and result.is_inference():
            self._detached[id(result)] = result


@contextlib.contextmanager
def traced_inference_mode(inside: bool) -> Iterator[None]:
    """Make a trace record the uses of ``torch.inference_mode()`` in this thread's code.

    Args:
            inside: True if the code is to see itself inside. Enter this outside in any case, with gradients
                off.
    """
    thread = threading.get_ident()

    def on_thread(ours: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (ours if threading.get_ident() == thread else own)(*args)

    if not inside:
        with private.modes_set_by(
            private.set_grad_enabled, on_thread(_recorded_inference_mode, private.InferenceMode)
        ):
            yield
        return
    shown = _Shown()
    grad_mode, mode = torch.is_grad_enabled, torch.is_inference_mode_enabled

    def for_users() -> bool:
        caller: str = sys._getframe(1).f_globals.get("__name__", "")
        users = threading.get_ident() == thread and caller.partition(".")[0] != "torch"
        return shown.inference if users else mode()

    with (
        private.modes_set_by(
            on_thread(shown.set_grad_enabled, private.set_grad_enabled),
            on_thread(shown.switch, private.InferenceMode),
        ),
        replaced(
            torch,
            is_grad_enabled=on_thread(shown.is_grad_enabled, grad_mode),
            is_inference_mode_enabled=for_users,
        ),
    ):
        yield


@contextlib.contextmanager
def _recorded_inference_mode(inference: bool) -> Iterator[None]:
    """Enter ``torch.inference_mode(inference)``, with the grad mode switched where a trace records it."""
    before = torch.is_grad_enabled()
    private.set_grad_enabled(not inference)
    try:
        with private.InferenceMode(inference):
            yield
    finally:
        private.set_grad_enabled(before)


class _Shown:
    """The two modes as code inside of inference mode sets them.

    Attributes:
        inference: True if inference mode is on.
        gradients: the grad mode while inference mode is on; otherwise that of the thread is used.
    """

    def __init__(self) -> None:
        self.inference, self.gradients = True, False
        self._is_grad_enabled = torch.is_grad_enabled

    def is_grad_enabled(self) -> bool:
        """Replace ``torch.is_grad_enabled``."""
        return self.gradients if self.inference else self._is_grad_enabled()

    def set_grad_enabled(self, mode: bool) -> None:
        """Replace the function that sets the grad mode."""
        if self.inference:
            self.gradients = mode
        else:
            private.set_grad_enabled(mode)

    @contextlib.contextmanager
    def switch(self, inference: bool) -> Iterator[None]:
        """Replace ``torch.inference_mode(inference)``."""
        before = self.inference, self.gradients
        already = self.inference and inference
        with contextlib.nullcontext() if already else private.InferenceMode(inference):
            self.inference, self.gradients = inference, False
            try:
                yield
            finally:
                self.inference, self.gradients = before
