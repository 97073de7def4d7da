"""entmax: sparse alternatives to softmax, and their losses.

They stay PythonOps. If ``k`` is given, their search for a threshold depends on the data, so torch cannot
determine the sizes of their outputs.
"""

from __future__ import annotations

from typing import Any

from torch2ort.pythonop.registry import register_shape_inferer

_ACTIVATIONS = (
    "entmax.activations.Entmax15Function",
    "entmax.activations.SparsemaxFunction",
    "entmax.root_finding.BudgetBisectFunction",
    "entmax.root_finding.EntmaxBisectFunction",
    "entmax.root_finding.NormmaxBisectFunction",
    "entmax.root_finding.SparsemaxBisectFunction",
)
_LOSSES = (
    "entmax.losses.Entmax15LossFunction",
    "entmax.losses.EntmaxBisectLossFunction",
    "entmax.losses.NormmaxBisectLossFunction",
    "entmax.losses.SparsemaxBisectLossFunction",
    "entmax.losses.SparsemaxLossFunction",
)


def _like_the_scores(node: Any, shapes: list[Any], dtypes: list[Any]) -> Any:
    return [shapes[0]], [dtypes[0]]


def _one_per_row(node: Any, shapes: list[Any], dtypes: list[Any]) -> Any:
    rows, _classes = shapes[0]
    return [[rows]], [dtypes[0]]


for _name in _ACTIVATIONS:
    register_shape_inferer(_name, _like_the_scores)
for _name in _LOSSES:
    register_shape_inferer(_name, _one_per_row)
