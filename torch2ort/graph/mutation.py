"""A write into a buffer or an input, as an extra output of a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Mutation:
    """An extra graph output that must be written back after a run.

    Attributes:
        output: name of the graph output.
        kind: whether the value is written to a buffer or to an input of the user.
        target: name of the buffer in the model, or of the graph input.
    """

    output: str
    kind: Literal["buffer", "input"]
    target: str
