"""What stands around every run that calls Functions."""

from __future__ import annotations

import threading

import torch

from torch2ort.errors import EngineError
from torch2ort.pythonop.native import native
from torch2ort.runtime._torch_private import set_grad_enabled


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
