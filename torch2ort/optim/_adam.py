"""Adam and AdamW."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch2ort.optim._optimizer import Optimizer, Settings, Tensors, missing_to_one, no_steps, zeros


class Adam(Optimizer):
    """Adam, as ``torch.optim.Adam``: weight decay is added to the gradient.

    Args:
        lr: learning rate to begin with.
        betas: how much is kept of the running means of the gradient and of its square.
        eps: added to the root of the second, against a division by zero.
        weight_decay: how strongly parameters are pulled to zero.
        amsgrad: divide by the largest running mean of squares that there was.
        bias_correction: correct both means for their beginning at zero.
        groups: settings of some parameters, see :class:`torch2ort.optim.Optimizer`.
        max_grad_norm: the most that the norm of all gradients together may be.
        max_grad_value: the most that a number in a gradient may be.

    Raises:
        OptionError: a setting is unknown or has a value that is not allowed.
    """

    _decouples = False

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        bias_correction: bool = True,
        *,
        groups: Sequence[Mapping[str, Any]] = (),
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
    ) -> None:
        super().__init__(
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
                "bias_correction": bias_correction,
            },
            groups=groups,
            max_grad_norm=max_grad_norm,
            max_grad_value=max_grad_value,
        )

    def init(self, parameters: Tensors) -> dict[str, Any]:
        """Running means of zero."""
        state = {
            "step": no_steps(parameters),
            "exp_avg": zeros(parameters),
            "exp_avg_sq": zeros(parameters),
        }
        largest = {name: p for name, p in parameters.items() if self._settings_of(name)["amsgrad"]}
        return {**state, "max_exp_avg_sq": zeros(largest)} if largest else state

    def _check(self, settings: Settings) -> None:
        self._need(settings["eps"] >= 0, "eps", settings["eps"], "a number that is not negative")

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
        if settings["weight_decay"] and self._decouples:
            parameter = parameter * (1 - lr * settings["weight_decay"])
        elif settings["weight_decay"]:
            gradient = gradient + settings["weight_decay"] * parameter
        mean = one * state["exp_avg"] + (1 - one) * gradient
        square = two * state["exp_avg_sq"] + (1 - two) * (gradient * gradient)
        kept = {"exp_avg": mean, "exp_avg_sq": square}
        if settings["amsgrad"]:
            square = kept["max_exp_avg_sq"] = torch.maximum(state["max_exp_avg_sq"], square)
        if not settings["bias_correction"]:
            return parameter - lr * (mean / (torch.sqrt(square) + settings["eps"])), kept
        # Both corrections in one number for all elements: a division less for each.
        root = torch.sqrt(missing_to_one(two, shared["step"]))
        rate = (lr * root / missing_to_one(one, shared["step"])).to(gradient.dtype)
        eps = (settings["eps"] * root).to(gradient.dtype)
        return parameter - rate * (mean / (torch.sqrt(square) + eps)), kept


class AdamW(Adam):
    """Adam with decoupled weight decay, as ``torch.optim.AdamW``.

    Args:
        lr: learning rate to begin with.
        betas: how much is kept of the running means of the gradient and of its square.
        eps: added to the root of the second, against a division by zero.
        weight_decay: how strongly parameters are pulled to zero, in multiples of the learning rate.
        amsgrad: divide by the largest running mean of squares that there was.
        bias_correction: correct both means for their beginning at zero.
        groups: settings of some parameters, see :class:`torch2ort.optim.Optimizer`.
        max_grad_norm: the most that the norm of all gradients together may be.
        max_grad_value: the most that a number in a gradient may be.

    Raises:
        OptionError: a setting is unknown or has a value that is not allowed.
    """

    _decouples = True

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        bias_correction: bool = True,
        *,
        groups: Sequence[Mapping[str, Any]] = (),
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
    ) -> None:
        super().__init__(
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            bias_correction,
            groups=groups,
            max_grad_norm=max_grad_norm,
            max_grad_value=max_grad_value,
        )
