"""A model of operators of one tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

Operator = Callable[[torch.Tensor], torch.Tensor]


class Applied(torch.nn.Module):
    """The result of each operator, by its name."""

    def __init__(self, operators: Mapping[str, Operator]) -> None:
        super().__init__()
        self.operators = dict(operators)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: operator(x) for name, operator in self.operators.items()}
