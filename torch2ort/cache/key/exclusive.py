"""One export at a time, and none while a model is looked at.

torch.export keeps state in the process while it works, and an export tries the model's code out: for that
time classes and objects that a model of another thread may share hold something else. Who reads them
meanwhile waits, or learns afterwards that there was an export.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from torch2ort.cache import _torch_private as private


class ExclusiveExport:
    """The right to export, or to look at a model; a thread may take it again while it has it.

    Attributes:
        idle: how many exports there were, or ``None`` during one. The same number before and after something
            else means that no export ran beside it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._running = self._ended = 0
        self.idle: int | None = 0

    @contextlib.contextmanager
    def exporting(self) -> Iterator[None]:
        """Keep others out while the block exports."""
        with self._lock:
            self._running += 1
            self.idle = None
            try:
                with private.notes_of_this_thread():
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


exclusive = ExclusiveExport()
