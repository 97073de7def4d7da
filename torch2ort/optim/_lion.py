"""Lion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch2ort.optim._optimizer import Optimizer, Settings, Tensors, zeros


class Lion(Optimizer):
    """Lion, as program 1 of https://arxiv.org/abs/2302.06675: the sign of the momentum, and weight decay.

    Args:
        lr: learning rate to begin with.
        betas: how much is kept of the momentum, for the step and for the next one.
        weight_decay: how strongly parameters are pulled to zero, in multiples of the learning rate.
        groups: settings of some parameters, see :class:`torch2ort.optim.Optimizer`.
        max_grad_norm: the most that the norm of all gradients together may be.
        max_grad_value: the most that a number in a gradient may be.

    Raises:
        OptionError: a setting is unknown or has a value that is not allowed.
    """

    def __init__(
        self,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        groups: Sequence[Mapping[str, Any]] = (),
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
    ) -> None:
        super().__init__(
            {"lr": lr, "betas": betas, "weight_decay": weight_decay},
            groups=groups,
            max_grad_norm=max_grad_norm,
            max_grad_value=max_grad_value,
        )

    def init(self, parameters: Tensors) -> dict[str, Any]:
        """A momentum of zero for each parameter."""
        return {"exp_avg": zeros(parameters)}

    def _update(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: Tensors,
        lr: torch.Tensor,
        shared: Tensors,
        settings: Settings,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        one, two = settings["betas"]
        mean = state["exp_avg"]
        direction = torch.sign(one * mean + (1 - one) * gradient)
        if settings["weight_decay"]:
            parameter = parameter * (1 - lr * settings["weight_decay"])
        return parameter - lr * direction, {"exp_avg": two * mean + (1 - two) * gradient}
