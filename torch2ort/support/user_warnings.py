"""Warnings of torch2ort, issued at the line of the user's code that they are about."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

from torch2ort.errors import Torch2OrtWarning
from torch2ort.log import rank_logs

# Packages of the code between the user's line and the warning: torch2ort, its callers, and modules in
# between.
_BETWEEN = frozenset(
    {
        "",  # generated code, such as that of torch.fx
        "_frozen_importlib",
        "_frozen_importlib_external",
        "contextlib",
        "functools",
        "importlib",
        "onnxruntime",
        "threading",
        "torch",
        "torch2ort",
    }
)


def warn(message: str) -> None:
    """Issue a :class:`Torch2OrtWarning` at the innermost line that is neither torch2ort's nor torch's.

    The stack level of that line is unknown: torch, hooks and context managers add frames.
    Only ranks that log (see :func:`torch2ort.log.rank_logs`) warn: all ranks would issue the same warning.

    Args:
        message: the complete message.
    """
    if not rank_logs():
        return
    frame = _users_frame()
    warnings.warn_explicit(
        message,
        Torch2OrtWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__", "<unknown>"),
        # Python records the shown warnings there, as for `warnings.warn`.
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _users_frame() -> FrameType:
    """Return the innermost frame of the user's code; the outermost frame in a thread of a library."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _package(frame) in _BETWEEN:
        frame = frame.f_back
    return frame


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
