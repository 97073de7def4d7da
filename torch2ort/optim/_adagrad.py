"""Adagrad."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch2ort.optim._optimizer import Optimizer, Settings, Tensors, no_steps


class Adagrad(Optimizer):
    """Adagrad, as ``torch.optim.Adagrad``.

    Args:
        lr: learning rate to begin with.
        lr_decay: how much the rate falls with each step.
        weight_decay: multiple of the parameter that is added to its gradient.
        initial_accumulator_value: what the sums of squares begin with.
        eps: added to their roots, against a division by zero.
        groups: settings of some parameters, see :class:`torch2ort.optim.Optimizer`.
        max_grad_norm: the most that the norm of all gradients together may be.
        max_grad_value: the most that a number in a gradient may be.

    Raises:
        OptionError: a setting is unknown or has a value that is not allowed.
    """

    def __init__(
        self,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        groups: Sequence[Mapping[str, Any]] = (),
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
    ) -> None:
        settings = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        super().__init__(settings, groups=groups, max_grad_norm=max_grad_norm, max_grad_value=max_grad_value)

    def init(self, parameters: Tensors) -> dict[str, Any]:
        """Sums of squares."""
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

    def _update(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: Tensors,
        lr: torch.Tensor,
        shared: Tensors,
        settings: Settings,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if settings["weight_decay"]:
            gradient = gradient + settings["weight_decay"] * parameter
        if settings["lr_decay"]:
            lr = lr / (1 + (shared["step"] - 1) * settings["lr_decay"])
        total = state["sum"] + gradient * gradient
        return parameter - lr * (gradient / (torch.sqrt(total) + settings["eps"])), {"sum": total}
