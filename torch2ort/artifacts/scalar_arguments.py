"""Checks of numbers that a user sets, and their conversion for the graphs."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from torch2ort.errors import OptionError

_SEEDS = range(-(1 << 63), 1 << 63)


def learning_rate(what: str, value: Any) -> float:
    """Return a learning rate as a float.

    Args:
        what: its name, for errors.
        value: a number, or an array of shape ().

    Raises:
        OptionError: the value is not a number, is negative, or exceeds the range of float32.
    """
    is_number = hasattr(value, "__float__") and getattr(value, "ndim", 0) == 0
    number = float(value) if is_number else math.nan
    if not 0 <= number <= float(np.finfo(np.float32).max):
        raise OptionError(f"{what}={value!r}: expected a number of float32 that is not negative")
    return number


def seed(value: Any) -> int:
    """Return a seed as an int.

    Raises:
        OptionError: the value is not an integer of 64 bits.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = _SEEDS.stop
    if number not in _SEEDS:
        raise OptionError(f"seed={value!r}: expected an integer of 64 bits")
    return number
