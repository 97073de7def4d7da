"""Checks of values by torch.distributions, as conditions that each run of a graph checks.

In eager PyTorch a distribution checks its parameters when it is created, and each sample that is passed to
it, and raises a ``ValueError`` for invalid ones. A trace has no values to check.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch

from torch2ort._torch import export as private
from torch2ort.kernels.index_check import VALUE_ERROR

_CHECKED_BY = torch.distributions.Distribution.__module__
# Limit of calls between the check and its code; they belong to modes that intercept functions of torch.
_MOST_CALLS = 16


def replacement_for(function: Any, arguments: tuple[Any, ...]) -> Any | None:
    """Return the replacement of ``function`` in a trace, if torch.distributions calls it; else ``None``."""
    if function is not private.is_all_true or type(arguments[0]) is torch.Tensor:
        return None
    frame = _checking()
    return None if frame is None else functools.partial(_checked_in_runs, _sentence(frame.f_locals))


def _checked_in_runs(sentence: str, valid: torch.Tensor) -> bool:
    private.assert_true(valid.all(), VALUE_ERROR + sentence)
    return True


def _checking() -> FrameType | None:
    """Return the frame of torch.distributions that is checking values."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_CALLS):
        if frame is None or frame.f_globals.get("__name__") == _CHECKED_BY:
            return frame
        frame = frame.f_back
    return None


def _sentence(variables: Mapping[str, Any]) -> str:
    """Return eager's message, without the values."""
    distribution, value = variables["self"], variables["value"]
    what = f"(Tensor of shape {tuple(value.shape)})"
    if "constraint" in variables:
        return (
            f"Expected parameter {variables['param']} {what} of distribution {distribution!r} to satisfy the "
            f"constraint {variables['constraint']!r}, but found invalid values"
        )
    return (
        f"Expected value argument {what} to be within the support ({variables['support']!r}) of the "
        f"distribution {distribution!r}, but found invalid values"
    )
