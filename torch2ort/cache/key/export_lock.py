"""Lock of exports: one export runs at a time, and none while a model is inspected.

torch.export keeps state in the process while it runs, and an export runs the model's code on trial. During
that time, classes and objects that a model of another thread may share have other content, and fake tensors
replace a model's weights. A thread that reads them meanwhile waits, or detects afterwards that an export ran.

A thread acquires this lock before any other. If it held a lock of the export cache, or one of a session's
runs, and then exported, it would wait for a thread that waits for it. Builds of later artifacts of a graph
acquire this lock, too.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import torch

from torch2ort._torch import global_state as private
from torch2ort.support.interpreter import old_objects_uncollected, protocols_read_once

# Longest time that a fork waits for exports of other threads: one of them may wait for the forking thread.
_LONGEST_WAIT_TO_FORK = 60.0


class ExclusiveExport:
    """The lock that a thread holds to export or to inspect a model; it is reentrant.

    Attributes:
        idle: number of exports so far, or ``None`` during one. The same number before and after some work
            means that no export ran at the same time.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._running = self._ended = 0
        self._forking = self._is_child = False
        self.idle: int | None = 0
        # A child process has only the forking thread, which would wait for the others forever.
        os.register_at_fork(
            before=self._before_fork,
            after_in_parent=self._after_fork,
            after_in_child=self._after_fork_in_child,
        )

    def _before_fork(self) -> None:
        """Wait for exports of other threads: a child would see the models in the middle of an export."""
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
        """Hold the lock while the block exports."""
        with self._lock:
            if self._is_child:
                self._is_child = False
                # PyTorch replaces the pool of threads that a fork broke on its first use.
                # In a build with CUDA,
                # two threads of autograd do that at once, and one of them ends the process.
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
        """Hold the lock, so that no other thread exports while the block inspects a model."""
        with self._lock:
            yield


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    """Make PyTorch and the interpreter trace as this package needs it."""
    # The import is slow, and a start from the cache does not trace.
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
