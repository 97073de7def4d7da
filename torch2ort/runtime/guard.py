"""What stands around every run that calls Functions."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from torch2ort.errors import EngineError
from torch2ort.pythonop.native import native


# onnxruntime holds a mutex of its own around a Function while our runner lets other threads run: without
# one order for both, two threads wait for each other forever.
class _PythonOpLock:
    """Lock around runs that call Functions; refuses a run inside a Function of another run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    def __enter__(self) -> None:
        if self._owner == threading.get_ident():
            raise EngineError(
                "a Function that ONNX Runtime is running called an ORTModule with Functions of its own; "
                "onnxruntime-training "
                "would wait for itself forever. Call the inner module's original inside the Function instead"
            )
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._owner = None
        self._lock.release()


python_op_lock = _PythonOpLock()


@contextlib.contextmanager
def contexts_in(run: native.Run | None) -> Iterator[None]:
    """Let the Functions that this thread runs leave their contexts in ``run``; ``None`` drops them."""
    before = native.begin(run)
    try:
        yield
    finally:
        native.begin(before)
