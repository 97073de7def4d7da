"""Where in the model's code something happened, and what its author can do there."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable

_OWN = r"[/\\](torch|torch2ort|onnxruntime|optree|contextlib\.py|functools\.py)([/\\]|$)"


def line_in(stack: Iterable[traceback.FrameSummary]) -> str:
    """``file:line in function`` of the innermost frame outside torch and torch2ort, or nothing."""
    frame = _innermost(stack)
    return f"{frame.filename}:{frame.lineno} in {frame.name} ({frame.line})" if frame else ""


def users_line(error: BaseException) -> str:
    """`` at file:line in function`` of the innermost frame outside torch and torch2ort."""
    line = line_in(traceback.extract_tb(error.__traceback__))
    return f" at {line}" if line else ""


def way_out(error: BaseException) -> str:
    """What to do about code that reads a value out of a tensor, by what it reads it for."""
    stack = traceback.extract_tb(error.__traceback__)
    if any(re.search(r"[/\\]torch[/\\]distributions[/\\]", frame.filename) for frame in stack):
        return (
            "torch.distributions checks there that the values are allowed. Make the distribution with "
            "validate_args=False, or call torch.distributions.Distribution.set_default_validate_args(False)"
        )
    frame = _innermost(stack)
    line = (frame.line or "") if frame else ""
    if "layerdrop" in line:
        return "It leaves out layers at random. Set the layerdrop of the model's configuration to 0"
    if "label" in line:
        return (
            "It looks at the labels. Call the model without them, and compute the loss from what it returns"
        )
    return "Use torch.where or torch.cond instead of the branch, or move the code into an autograd.Function"


def is_users(file: str) -> bool:
    """Whether a file is neither torch's nor torch2ort's."""
    return not re.search(_OWN, file) and not file.startswith("<")


def _innermost(stack: Iterable[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    frames = [f for f in stack if is_users(f.filename)]
    return frames[-1] if frames else None
