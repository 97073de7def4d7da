"""Lines of the model's code in which something happened, and remedies for its author."""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Iterable

from torch2ort.support.install_paths import below, folder_of, is_pythons, real_path

# Packages whose code runs between the user's code and an operator.
LIBRARIES = ("torch", "torch2ort", "onnxruntime", "optree")
# Names that Python and torch give to generated code without a file. Other such code is the user's.
_MADE = ("<frozen ", "<eval_with_key>", "<__array_function__ ")


def line_in(stack: Iterable[traceback.FrameSummary]) -> str:
    """Return ``file:line in function`` of the innermost frame of the user's code; empty without one."""
    frame = _innermost(stack)
    if frame is None:
        return ""
    text = f" ({frame.line})" if frame.line else ""
    return f"{frame.filename}:{frame.lineno} in {frame.name}{text}"


def users_line(error: BaseException) -> str:
    """Return `` at file:line in function`` of the innermost frame of the user's code; empty without one."""
    line = line_in(traceback.extract_tb(error.__traceback__))
    return f" at {line}" if line else ""


def way_out(error: BaseException) -> str:
    """Return the remedy for code that reads a value out of a tensor, by the purpose of the read."""
    stack = traceback.extract_tb(error.__traceback__)
    if any(_is_in(frame.filename, "torch", "distributions") for frame in stack):
        return (
            "torch.distributions checks there that the values are allowed. Make the distribution with "
            "validate_args=False, or call torch.distributions.Distribution.set_default_validate_args(False)"
        )
    frame = _innermost(stack)
    line = (frame.line or "") if frame else ""
    if "layerdrop" in line:
        return "It leaves out layers at random. Set the layerdrop of the model's configuration to 0"
    if "label" in line:
        return "It looks at the labels. Call the model without them, and compute the loss from its outputs"
    return (
        "Use torch.where instead of the branch, or move the code into an autograd.Function. "
        "torch.compile(model, backend='torch2ort') runs such code unchanged, in several graphs"
    )


@functools.lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """Return True if a file is neither of Python's standard library nor of one of :data:`LIBRARIES`."""
    if file.startswith("<"):
        return not file.startswith(_MADE)
    return not is_pythons(real_path(file)) and not any(_is_in(file, library) for library in LIBRARIES)


def _is_in(file: str, library: str, *folders: str) -> bool:
    root = folder_of(library)
    return root is not None and below(real_path(file), os.path.join(root, *folders))


def _innermost(stack: Iterable[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    frames = [f for f in stack if is_users(f.filename)]
    # "<string>" is the file of code that dataclasses and namedtuples generate, and of `python -c`.
    return next((f for f in reversed(frames) if f.filename != "<string>"), frames[-1] if frames else None)
