"""The run that Functions of a thread leave their contexts in."""

from __future__ import annotations

import torch

from torch2ort._torch.storage import set_grad_enabled
from torch2ort.pythonop.native import native


class contexts_in:  # noqa: N801 - used as a function; a generator would cost a microsecond a run
    """Lets the Functions that this thread runs leave their contexts in ``run``; ``None`` drops them.

    Args:
        run: what they are left in.
        without_grad: whether autograd records nothing meanwhile.
    """

    __slots__ = ("_before", "_recording", "_run", "_without_grad")

    def __init__(self, run: native.Run | None, *, without_grad: bool = False) -> None:
        self._run, self._without_grad = run, without_grad

    def __enter__(self) -> None:
        self._recording = self._without_grad and torch.is_grad_enabled()
        if self._recording:
            set_grad_enabled(False)
        self._before = native.begin(self._run)

    def __exit__(self, *_: object) -> None:
        native.begin(self._before)
        if self._recording:
            set_grad_enabled(True)
