"""Lion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torch2ort.optim._optimizer import At, Optimizer, Tensors, Updated, zeros


@dataclass(frozen=True, eq=False, repr=False)
class Lion(Optimizer):
    """Lion, as program 1 of https://arxiv.org/abs/2302.06675: the sign of the momentum, and weight decay.

    Args:
        lr: initial learning rate.
        betas: coefficients of the momentum: in the direction of the step, and in the new momentum.
        weight_decay: part of the parameter that is subtracted from it, in multiples of the learning rate.
        groups, max_grad_norm, max_grad_value: as for :class:`torch2ort.optim.Optimizer`.

    Raises:
        OptionError: a setting is unknown or has a value that is not allowed.
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    def init(self, parameters: Tensors) -> dict[str, Any]:
        """Return a momentum of zero for each parameter."""
        return {"exp_avg": zeros(parameters)}

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, state: Tensors, at: At) -> Updated:
        settings = at.settings
        one, two = settings["betas"]
        mean = state["exp_avg"]
        direction = torch.sign(one * mean + (1 - one) * gradient)
        if settings["weight_decay"]:
            parameter = parameter * (1 - at.lr * settings["weight_decay"])
        return parameter - at.lr * direction, {"exp_avg": two * mean + (1 - two) * gradient}
