"""Values that have rows, and the rows of them that are needed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch

from torch2ort.program.sparsity.row_axes import Axes

if TYPE_CHECKING:
    from torch2ort.program.sparsity.inspection_graph import InspectionGraph


class Need(IntEnum):
    """The rows of a value that the program's results depend on; a larger one includes the smaller ones."""

    NONE = 0
    # Rows that a loss or a selection reads.
    READ = 1
    # Rows that those depend on by attention, too.
    ATTENDED = 2
    ALL = 3


@dataclass(frozen=True)
class RowValue:
    """A value that has rows.

    Attributes:
        axes: its dimensions.
        start: the token of a sequence that is its first; not 0 after a slice.
        is_sliced: True if it lacks some tokens of each sequence.
        live: where not ``None``, the node of the inspection that is True in rows whose value depends on the
            row; other rows have the same value for all contents of the row.
        is_masked: True for the result of the operator that makes the other rows so.
        masks: for scores of attention, the operands that mask keys.
        is_softmax: True for weights of attention.
    """

    axes: Axes
    start: int = 0
    is_sliced: bool = False
    live: torch.fx.Node | None = None
    is_masked: bool = False
    masks: tuple[Mask, ...] = ()
    is_softmax: bool = False


@dataclass(frozen=True)
class Mask:
    """An operand that keeps attention from reading keys.

    Attributes:
        node: the tensor.
        kind: ``"add"`` for a tensor that is added to scores, ``"keep"`` for one that is True where keys are
            read, ``"drop"`` for one that is True where they are not.
        axes: the dimensions of the scores.
    """

    node: torch.fx.Node
    kind: str
    axes: Axes


@dataclass
class Rows:
    """The result of the analysis.

    Attributes:
        sizes: number of sequences, and of tokens in each.
        index: the first tensor with these sizes.
        values: the values that have rows.
        need: for each of them, the rows that the program's results depend on.
        terminals: nodes that read some rows, and whose result has no rows.
        inspection: the computation of these rows.
        reasons: for a value that is read in all rows, the node that reads it so.
        attention: for a node that computes attention by masks that are known alone, the position of its mask
            among those of the inspection.
    """

    sizes: tuple[Any, Any]
    index: torch.fx.Node
    values: dict[torch.fx.Node, RowValue]
    need: dict[torch.fx.Node, Need]
    terminals: dict[torch.fx.Node, torch.fx.Node]
    inspection: InspectionGraph
    reasons: dict[torch.fx.Node, torch.fx.Node]
    attention: dict[torch.fx.Node, int]


def dims_without_rows(dims: Any, value: RowValue) -> list[int] | None:
    """Return dimensions as positive numbers if none of them has rows; ``None`` otherwise."""
    given = [dims] if isinstance(dims, int) else dims
    if not given:
        return None
    found = [d % len(value.axes) for d in given]
    return None if any(value.axes[d] for d in found) else found
