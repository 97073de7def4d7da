"""One export at a time, and none while a model is looked at.

torch.export keeps state in the process while it works, and an export tries the model's code out: for that
time classes and objects that a model of another thread may share hold something else, and fake tensors stand
in the place of a model's weights. Who reads them meanwhile waits, or learns afterwards that there was an
export.

This lock comes before any other: who holds a lock of the export cache, or one of a session's runs, and then
exports would wait for a thread that waits for it. What is built for a graph afterwards takes it, too.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import torch

from torch2ort._torch import global_state as private
from torch2ort.support.interpreter import old_objects_uncollected, protocols_read_once

# A fork waits no longer for the exports of other threads: one of them may wait for what forks.
_LONGEST_WAIT_TO_FORK = 60.0


class ExclusiveExport:
    """The right to export, or to look at a model; a thread may take it again while it has it.

    Attributes:
        idle: how many exports there were, or ``None`` during one. The same number before and after something
            else means that no export ran beside it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._running = self._ended = 0
        self._forking = self._is_child = False
        self.idle: int | None = 0
        # A child has the thread that forks alone, which would wait for the others forever.
        os.register_at_fork(
            before=self._before_fork,
            after_in_parent=self._after_fork,
            after_in_child=self._after_fork_in_child,
        )

    def _before_fork(self) -> None:
        """Wait for the exports of other threads, in the middle of which a child would find the models."""
        self._forking = self._lock.acquire(timeout=_LONGEST_WAIT_TO_FORK)

    def _after_fork(self) -> None:
        if self._forking:
            self._forking = False
            self._lock.release()

    def _after_fork_in_child(self) -> None:
        if not self._forking:
            self._lock = threading.RLock()
        self._after_fork()
        self._is_child = True

    @contextlib.contextmanager
    def exporting(self) -> Iterator[None]:
        """Keep others out while the block exports."""
        with self._lock:
            if self._is_child:
                self._is_child = False
                # PyTorch replaces the pool of threads that a fork broke when it is first used. Two threads of
                # autograd do that at once in a build with CUDA, and one of them ends the process.
                torch.set_num_threads(torch.get_num_threads())
            self._running += 1
            self.idle = None
            try:
                with contextlib.nullcontext() if self._running > 1 else _patched():
                    yield
            finally:
                self._running -= 1
                self._ended += 1
                self.idle = None if self._running else self._ended

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Keep exports of other threads out while the block looks at a model."""
        with self._lock:
            yield


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    """Have PyTorch and the interpreter trace as this package needs it."""
    # What traces takes long to import, and a start out of the cache does not trace.
    from torch2ort.sizes.unbacked_sizes import (
        arithmetic_done_once,
        guards_with_lines,
        kernels_chosen_unconditionally,
    )

    with (
        old_objects_uncollected(),
        protocols_read_once(),
        private.notes_of_this_thread(),
        private.code_written_when_read(),
        kernels_chosen_unconditionally(),
        guards_with_lines(),
        arithmetic_done_once(),
    ):
        yield


exclusive = ExclusiveExport()
