"""A call of an ORTModule, as a graph takes it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torch2ort import io_schema
from torch2ort.capture.modes import Modes


class Given(NamedTuple):
    """A call, as a graph takes it.

    Attributes:
        signature: of the model's forward.
        tensors: its tensors, flat.
        schema: the structure around them.
        modes: PyTorch's switches.
        numbers: positions of the tensors that stand for numbers.
    """

    signature: io_schema.Signature
    tensors: list[torch.Tensor]
    schema: io_schema.Schema
    modes: Modes
    numbers: frozenset[int] = frozenset()
