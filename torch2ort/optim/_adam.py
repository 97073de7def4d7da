"""Adam and AdamW."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torch2ort.optim._optimizer import (
    At,
    Optimizer,
    Settings,
    Tensors,
    Updated,
    missing_to_one,
    no_steps,
    zeros,
)


@dataclass(frozen=True, eq=False, repr=False)
class Adam(Optimizer):
    """Adam, as ``torch.optim.Adam``: weight decay is added to the gradient.

    Args:
        lr: initial learning rate.
        betas: coefficients of the running means of the gradient and of its square.
        eps: added to the root of the second mean, to avoid a division by zero.
        weight_decay: multiple of the parameter that is added to its gradient.
        amsgrad: whether to divide by the largest running mean of squares so far.
        bias_correction: whether to correct both means for their initial value of zero.
        groups, max_grad_norm, max_grad_value: as for :class:`torch2ort.optim.Optimizer`.

    Raises:
        OptionError: a setting is unknown or has a value that is not allowed.
    """

    _decouples = False

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    bias_correction: bool = True

    def init(self, parameters: Tensors) -> dict[str, Any]:
        """Return running means of zero."""
        state = no_means(parameters)
        largest = {name: p for name, p in parameters.items() if self._settings_of(name)["amsgrad"]}
        return {**state, "max_exp_avg_sq": zeros(largest)} if largest else state

    def _check(self, settings: Settings) -> None:
        self._need(settings["eps"] >= 0, "eps", settings["eps"], "a number that is not negative")

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, state: Tensors, at: At) -> Updated:
        settings = at.settings
        if settings["weight_decay"] and self._decouples:
            parameter = parameter * (1 - at.lr * settings["weight_decay"])
        elif settings["weight_decay"]:
            gradient = gradient + settings["weight_decay"] * parameter
        one, two = settings["betas"]
        kept = means(state, gradient, settings)
        mean, square = kept["exp_avg"], kept["exp_avg_sq"]
        if settings["amsgrad"]:
            square = kept["max_exp_avg_sq"] = torch.maximum(state["max_exp_avg_sq"], square)
        if not settings["bias_correction"]:
            return parameter - at.lr * (mean / (torch.sqrt(square) + settings["eps"])), kept
        # Both corrections are in one number for all elements, which saves a division per element.
        root = torch.sqrt(missing_to_one(two, at.shared["step"]))
        rate = (at.lr * root / missing_to_one(one, at.shared["step"])).to(gradient.dtype)
        eps = (settings["eps"] * root).to(gradient.dtype)
        return parameter - rate * (mean / (torch.sqrt(square) + eps)), kept


@dataclass(frozen=True, eq=False, repr=False)
class AdamW(Adam):
    """Adam with decoupled weight decay, as ``torch.optim.AdamW``.

    Args:
        lr, betas, eps, amsgrad, bias_correction: as for :class:`Adam`.
        weight_decay: part of the parameter that is subtracted from it, in multiples of the learning rate.
        groups, max_grad_norm, max_grad_value: as for :class:`torch2ort.optim.Optimizer`.

    Raises:
        OptionError: a setting is unknown or has a value that is not allowed.
    """

    _decouples = True

    weight_decay: float = 1e-2


def no_means(parameters: Tensors) -> dict[str, Any]:
    """Return the running means before the first gradient: zero."""
    return {"step": no_steps(parameters), "exp_avg": zeros(parameters), "exp_avg_sq": zeros(parameters)}


def means(state: Tensors, gradient: torch.Tensor, settings: Settings) -> dict[str, torch.Tensor]:
    """Return the running means of the gradient and of its square, updated with a gradient."""
    one, two = settings["betas"]
    return {
        "exp_avg": one * state["exp_avg"] + (1 - one) * gradient,
        "exp_avg_sq": two * state["exp_avg_sq"] + (1 - two) * (gradient * gradient),
    }
