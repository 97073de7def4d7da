"""One call of a model, as an export and a graph take it."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torch2ort import io_schema
from torch2ort.capture.torch_modes import Modes
from torch2ort.graph.identical_inputs import Identical

# What torch.export takes for one tensor: nothing, or a Dim (or None) for some of its dimensions.
DimSpec = Mapping[int, Any] | Sequence[Any] | None


# In front of the name of each parameter and buffer in a program: the attribute of capture.trace.FlatModel.
PREFIX = "model."


class Purpose(enum.Enum):
    """What a graph of a call is for, which decides what of the call is in it.

    Attributes:
        FILE: a graph that stands by itself: the model's own hooks are part of it.
        MODULE: one that runs inside of the model's call, whose ``__call__`` runs the hooks: Functions get the
            tensors of each call themselves, and what forward leaves in Python objects is left again.
    """

    FILE = enum.auto()
    MODULE = enum.auto()


class Call(NamedTuple):
    """One call of a model.

    Attributes:
        signature: names and defaults of the model's arguments.
        tensors: its tensors, flat.
        schema: the structure around them.
        modes: PyTorch's switches.
        dim_specs: per tensor, which dimensions vary; empty for one that nobody has asked that of.
        numbers: positions of the tensors that stand for numbers.
        same: which of the tensors are the same object; by default each is an input of its own.
        purpose: of the graph that is made of it.
    """

    signature: io_schema.Signature
    tensors: list[torch.Tensor]
    schema: io_schema.Schema
    modes: Modes
    dim_specs: Sequence[DimSpec] = ()
    numbers: frozenset[int] = frozenset()
    same: Identical = ()
    purpose: Purpose = Purpose.FILE
