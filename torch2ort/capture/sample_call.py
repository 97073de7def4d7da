"""What goes into an export: one call of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch2ort import io_schema
from torch2ort.graph.identical_inputs import Identical

# What torch.export takes for one tensor: nothing, or a Dim (or None) for some of its dimensions.
DimSpec = Mapping[int, Any] | Sequence[Any] | None


@dataclass(frozen=True)
class Call:
    """One call of a model, as an export takes it.

    Attributes:
        signature: names and defaults of the model's arguments.
        tensors: its tensors, flat.
        schema: the structure around them.
        dim_specs: per tensor, which dimensions vary.
        numbers: positions of the tensors that stand for numbers.
        same: which of the tensors are the same object; by default each is an input of its own.
    """

    signature: io_schema.Signature
    tensors: Sequence[torch.Tensor]
    schema: io_schema.Schema
    dim_specs: Sequence[DimSpec]
    numbers: frozenset[int] = frozenset()
    same: Identical = ()
