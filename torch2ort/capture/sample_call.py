"""One call of a model, as the input of an export and of a graph."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torch2ort import io_schema
from torch2ort.capture.torch_modes import Modes
from torch2ort.graph.identical_inputs import Identical

# torch.export's specification for one tensor: None, or a Dim (or None) for some of its dimensions.
DimSpec = Mapping[int, Any] | Sequence[Any] | None


# Prefix of the name of each parameter and buffer in a program: the attribute of capture.trace.FlatModel.
PREFIX = "model."


class Purpose(enum.Enum):
    """Use of a call's graph, which determines the parts of the call that it contains.

    Attributes:
        FILE: a separate graph: the model's own hooks are part of it.
        MODULE: a graph that runs inside of the model's call, whose ``__call__`` runs the hooks: Functions get
            the tensors of each call themselves, and the effects of forward on Python objects are repeated.
    """

    FILE = enum.auto()
    MODULE = enum.auto()


class Call(NamedTuple):
    """One call of a model.

    Attributes:
        signature: names and defaults of the model's arguments.
        tensors: its tensors, flat.
        schema: the nested structure of the arguments.
        modes: PyTorch's switches.
        dim_specs: for each tensor, the dimensions that vary; empty if they were not specified.
        numbers: positions of the tensors that represent numbers.
        same: the tensors that are one object; by default each is an input of its own.
        purpose: use of the graph that is made from it.
    """

    signature: io_schema.Signature
    tensors: list[torch.Tensor]
    schema: io_schema.Schema
    modes: Modes
    dim_specs: Sequence[DimSpec] = ()
    numbers: frozenset[int] = frozenset()
    same: Identical = ()
    purpose: Purpose = Purpose.FILE
