"""What stands around every run that calls Functions."""

from __future__ import annotations

import threading

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


class contexts_in:  # noqa: N801 - used as a function; a generator would cost a microsecond a run
    """Lets the Functions that this thread runs leave their contexts in ``run``; ``None`` drops them."""

    __slots__ = ("_before", "_run")

    def __init__(self, run: native.Run | None) -> None:
        self._run = run

    def __enter__(self) -> None:
        self._before = native.begin(self._run)

    def __exit__(self, *_: object) -> None:
        native.begin(self._before)
