"""Stochastic gradient descent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torch2ort.optim._optimizer import At, Optimizer, Settings, Tensors, Updated, no_steps, zeros


@dataclass(frozen=True, eq=False, repr=False)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum, as ``torch.optim.SGD``.

    Args:
        lr: initial learning rate.
        momentum: part of the last step's direction that is added to the gradient.
        dampening: part of the gradient that is left out of the direction, after the first step.
        weight_decay: multiple of the parameter that is added to its gradient.
        nesterov: whether to use Nesterov momentum.
        groups, max_grad_norm, max_grad_value: as for :class:`torch2ort.optim.Optimizer`.

    Raises:
        OptionError: a setting is unknown or has a value that is not allowed.
    """

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def init(self, parameters: Tensors) -> dict[str, Any]:
        """Return a momentum of zero for each parameter that has momentum."""
        settings = {name: self._settings_of(name) for name in parameters}
        moved = {name: value for name, value in parameters.items() if settings[name]["momentum"]}
        state: dict[str, Any] = {"momentum_buffer": zeros(moved)} if moved else {}
        if any(settings[name]["dampening"] for name in moved):
            state["step"] = no_steps(parameters)
        return state

    def _check(self, settings: Settings) -> None:
        momentum = settings["momentum"]
        self._need(momentum >= 0, "momentum", momentum, "a number that is not negative")
        plain = not settings["nesterov"] or (momentum > 0 and settings["dampening"] == 0)
        self._need(plain, "nesterov", True, "a momentum above 0 and no dampening with it")

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, state: Tensors, at: At) -> Updated:
        settings = at.settings
        momentum, dampening = settings["momentum"], settings["dampening"]
        if settings["weight_decay"]:
            gradient = gradient + settings["weight_decay"] * parameter
        kept = {}
        if momentum:
            given = gradient
            if dampening:
                part = torch.where(at.shared["step"] == 1, 1.0, 1.0 - dampening)
                given = gradient * part.to(gradient.dtype)
            buffer = kept["momentum_buffer"] = momentum * state["momentum_buffer"] + given
            gradient = gradient + momentum * buffer if settings["nesterov"] else buffer
        return parameter - at.lr * gradient, kept
