"""The run in which Functions of a thread store their contexts."""

from __future__ import annotations

import torch

from torch2ort._torch.storage import set_grad_enabled
from torch2ort.pythonop.native import native


class contexts_in:  # noqa: N801 - used as a function; a generator would cost a microsecond a run
    """Context manager in which Functions of this thread store their contexts in ``run``; ``None`` drops them.

    Args:
        run: the run of a step.
        without_grad: whether autograd is disabled as well.
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
