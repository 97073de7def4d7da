"""A write into a buffer or an input, as an extra output of a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Mutation:
    """An extra graph output that must be written back after a run.

    Attributes:
        output: name of the graph output.
        kind: whether a buffer or a user input takes the value.
        target: name of the buffer in the model, or of the graph input.
    """

    output: str
    kind: Literal["buffer", "input"]
    target: str
