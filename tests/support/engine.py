"""The engine that trains what the tests train: the environment's best, or the one that ``--engine`` names."""

from __future__ import annotations

from torch2ort import Options
from torch2ort.engines.choose import JOINT, engine_name

# What --engine says; set before any test is collected.
asked: str | None = None


def trains_jointly() -> bool:
    """Whether it is the joint engine."""
    return (asked or engine_name(Options())) == JOINT
