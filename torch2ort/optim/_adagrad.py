"""Adagrad."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torch2ort.optim._optimizer import At, Optimizer, Settings, Tensors, Updated, no_steps


@dataclass(frozen=True, eq=False, repr=False)
class Adagrad(Optimizer):
    """Adagrad, as ``torch.optim.Adagrad``.

    Args:
        lr: initial learning rate.
        lr_decay: decay of the learning rate per step.
        weight_decay: multiple of the parameter that is added to its gradient.
        initial_accumulator_value: initial value of the sums of squares.
        eps: added to the roots of the sums, to avoid a division by zero.
        groups, max_grad_norm, max_grad_value: as for :class:`torch2ort.optim.Optimizer`.

    Raises:
        OptionError: a setting is unknown or has a value that is not allowed.
    """

    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def init(self, parameters: Tensors) -> dict[str, Any]:
        """Return the initial sums of squares."""
        first = {
            name: torch.full_like(
                value, self._settings_of(name)["initial_accumulator_value"], requires_grad=False
            )
            for name, value in parameters.items()
        }
        return {"step": no_steps(parameters), "sum": first}

    def _check(self, settings: Settings) -> None:
        for name in ("lr_decay", "initial_accumulator_value", "eps"):
            self._need(settings[name] >= 0, name, settings[name], "a number that is not negative")

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, state: Tensors, at: At) -> Updated:
        settings = at.settings
        if settings["weight_decay"]:
            gradient = gradient + settings["weight_decay"] * parameter
        lr = at.lr
        if settings["lr_decay"]:
            lr = lr / (1 + (at.shared["step"] - 1) * settings["lr_decay"])
        total = state["sum"] + gradient * gradient
        return parameter - lr * (gradient / (torch.sqrt(total) + settings["eps"])), {"sum": total}
