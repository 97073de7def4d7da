"""Calls of a Function's code that do input or output: files, logs, clocks, other processes."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch2ort.support.install_paths import is_pythons_module

# Modules written in C that do input or output.
_OUTSIDE = frozenset(("_io", "io", "nt", "posix", "time", "_posixsubprocess", "_socket", "_warnings"))
_PURE = frozenset(("fspath", "StringIO", "BytesIO"))
_SPEAKS: frozenset[Any] = frozenset((print, open, input))
# Called only for records that are logged, not for those that the level filters out.
_LOGS = logging.Logger.makeRecord.__code__
# Libraries that trace; their own calls while the Function runs do not count.
_TRACES = ("torch", "torch2ort", "sympy", "mpmath")


@contextlib.contextmanager
def in_front_of_calls_outside(found: Callable[[str], None]) -> Iterator[None]:
    """Call ``found`` before each such call of a Function's code in the context, with the callee's name.

    An exception of ``found`` ends that code. Finalizers of unreachable objects, which may call anything and
    are no part of the code, wait until it has ended.
    """

    def look(frame: FrameType, event: str, argument: Any) -> None:
        name = ""
        if event == "c_call":
            if argument in _SPEAKS or _is_outside(argument):
                name = argument.__name__
        elif event == "call" and frame.f_code is _LOGS:
            name = "a logger"
        if name and _is_functions(frame if event == "c_call" else frame.f_back):
            found(name)

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()


def _is_outside(called: Any) -> bool:
    if called.__name__ in _PURE:
        return False
    of = getattr(called, "__self__", None)
    if isinstance(of, io.IOBase):
        return not isinstance(of, (io.StringIO, io.BytesIO))
    return called.__module__ in _OUTSIDE or getattr(of, "__module__", None) == "datetime"


def _is_functions(frame: FrameType | None) -> bool:
    """Return True if a frame is of the Function's code, or of the standard library called by it."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] in _TRACES:
            return False
        if not is_pythons_module(name):
            return True
        frame = frame.f_back
    return False
