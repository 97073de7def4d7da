"""LAMB."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torch2ort.optim._adam import means, no_means
from torch2ort.optim._optimizer import At, Optimizer, Settings, Tensors, Updated, missing_to_one


@dataclass(frozen=True, eq=False, repr=False)
class Lamb(Optimizer):
    """LAMB, as algorithm 2 of https://arxiv.org/abs/1904.00962: each parameter's step has its own norm.

    The direction is Adam's, with weight decay added. It is scaled by the ratio of the parameter's norm to the
    direction's, which is 1 if one of the two is 0.

    Args:
        lr: initial learning rate.
        betas: coefficients of the running means of the gradient and of its square.
        eps: added to the root of the second mean, to avoid a division by zero.
        weight_decay: multiple of the parameter that is added to its direction.
        bias_correction: whether to correct both means for their initial value of zero.
        min_ratio: the smallest ratio; smaller ones are clamped to it.
        max_ratio: the largest ratio; larger ones are clamped to it.
        groups, max_grad_norm, max_grad_value: as for :class:`torch2ort.optim.Optimizer`.

    Raises:
        OptionError: a setting is unknown or has a value that is not allowed.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.0
    bias_correction: bool = True
    min_ratio: float = 0.0
    max_ratio: float = float("inf")

    def init(self, parameters: Tensors) -> dict[str, Any]:
        """Return running means of zero."""
        return no_means(parameters)

    def _check(self, settings: Settings) -> None:
        self._need(settings["eps"] >= 0, "eps", settings["eps"], "a number that is not negative")
        ordered = settings["min_ratio"] <= settings["max_ratio"]
        self._need(ordered, "max_ratio", settings["max_ratio"], "a number of at least min_ratio")

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, state: Tensors, at: At) -> Updated:
        settings = at.settings
        one, two = settings["betas"]
        kept = means(state, gradient, settings)
        mean, square = kept["exp_avg"], kept["exp_avg_sq"]
        if settings["bias_correction"]:
            mean = mean / missing_to_one(one, at.shared["step"]).to(mean.dtype)
            square = square / missing_to_one(two, at.shared["step"]).to(square.dtype)
        direction = mean / (torch.sqrt(square) + settings["eps"])
        if settings["weight_decay"]:
            direction = direction + settings["weight_decay"] * parameter
        norm, length = torch.linalg.vector_norm(parameter), torch.linalg.vector_norm(direction)
        both = (norm > 0) & (length > 0)
        ratio = torch.where(both, norm / torch.where(both, length, 1.0), 1.0)
        if settings["min_ratio"] > 0 or settings["max_ratio"] < float("inf"):
            ratio = torch.clamp(ratio, settings["min_ratio"], settings["max_ratio"])
        return parameter - (at.lr * ratio).to(parameter.dtype) * direction, kept
