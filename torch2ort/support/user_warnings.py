"""How torch2ort warns: at the line of the user's code that a warning is about."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

from torch2ort.errors import Torch2OrtWarning
from torch2ort.log import speaks

# Code between the user's line and the warning: torch2ort itself, what calls it, and what it goes through.
_BETWEEN = frozenset(
    {
        "",  # code that was made, as torch.fx makes it
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

    Levels of the stack cannot be counted: there are as many as torch, hooks and context managers put there.
    Only ranks that speak warn: each would say the same.

    Args:
        message: the whole sentence.
    """
    if not speaks():
        return
    frame = _users_frame()
    warnings.warn_explicit(
        message,
        Torch2OrtWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__", "<unknown>"),
        # Where Python notes which warnings it has shown, as for `warnings.warn`.
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _users_frame() -> FrameType:
    """The innermost frame of the user's code; the outermost of all where a thread of a library runs."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _package(frame) in _BETWEEN:
        frame = frame.f_back
    return frame


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
