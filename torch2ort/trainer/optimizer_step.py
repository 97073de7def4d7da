"""Weight updates: clipping, and the optimizer of torch2ort.optim that a config describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from torch2ort import OptionError
from torch2ort import optim as functions
from torch2ort.trainer.optim.config import AdamConfig, _OptimizerConfig

Tensors: TypeAlias = Mapping[str, torch.Tensor]

# Name of a state of torch2ort.optim -> its name in a trainer's state.
MOMENTS = {"exp_avg": "Moment_1", "exp_avg_sq": "Moment_2"}
STEP = "step"


class Update:
    """The optimizer and its state.

    Args:
        config: hyperparameters.
        parameters: the weights that are trained, by name; changed in place.
        owned: those that this process updates; the state is for them alone.
        clips: True to limit the norm of the gradients, for Adam and LAMB.

    Raises:
        OptionError: a group names a weight that is not trained.

    Attributes:
        lr: the initial learning rate.
        state: the optimizer's state, in the layout of :mod:`torch2ort.optim`.
    """

    def __init__(
        self,
        config: _OptimizerConfig,
        parameters: Mapping[str, torch.nn.Parameter],
        owned: Mapping[str, torch.nn.Parameter],
        *,
        clips: bool,
    ) -> None:
        self._parameters, self._owned = parameters, owned
        self.lr = config.lr
        self._groups = _groups(config, parameters)
        self._clips = clips and config.name != "SGDOptimizer"
        self._optimizer = _optimizer(config, self._groups)
        self.state: dict[str, Any] = self._optimizer.init(dict(owned))

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update this process's weights by their gradients; a weight without a gradient is not changed."""
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        # The norm is that of all gradients, also of those that another process applies.
        clipped = self._clip(gradients)
        mine = {name: clipped[name] for name in gradients if name in self._owned}
        present = {name: self._owned[name].detach() for name in mine}
        updated, self.state = self._update(present, mine, self.state, lr)
        for name, value in updated.items():
            self._owned[name].copy_(value)

    def init(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return the state before the first update, as optimizers of torch2ort.optim do."""
        return self._optimizer.init(parameters)

    def __call__(
        self, parameters: Tensors, gradients: Tensors, state: Mapping[str, Any], lr: torch.Tensor | float
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Update as a function of tensors, as optimizers of torch2ort.optim do, clipping included."""
        return self._update(parameters, self._clip(gradients), state, lr)

    def _update(
        self, parameters: Tensors, gradients: Tensors, state: Mapping[str, Any], lr: torch.Tensor | float
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        updated, new = self._optimizer(parameters, gradients, state, lr)
        for values, names in self._groups:
            for name in names:
                if _decays_late(values) and name in gradients:
                    updated[name] = updated[name] * (1 - lr * values["lambda"])
        return updated, new

    def _clip(self, gradients: Tensors) -> dict[str, torch.Tensor]:
        """Limit the norm of all gradients together, for each group to its own limit, as PyTorch does."""
        if not self._clips or not gradients:
            return dict(gradients)
        norms = [torch.linalg.vector_norm(value) for value in gradients.values()]
        total = torch.linalg.vector_norm(torch.stack(norms))
        clipped = dict(gradients)
        for values, names in self._groups:
            factor = torch.clamp(values["max_norm_clip"] / (total + 1e-6), max=1.0)
            clipped.update({name: gradients[name] * factor for name in names if name in gradients})
        return clipped


def _groups(
    config: _OptimizerConfig, parameters: Mapping[str, torch.nn.Parameter]
) -> list[tuple[Mapping[str, Any], list[str]]]:
    """Return the groups: hyperparameters, and the names of the weights that have them."""
    groups = [(group, list(group["params"])) for group in config.params]
    named = {name for _, names in groups for name in names}
    unknown = sorted(named - parameters.keys())
    if unknown:
        raise OptionError(
            f"optim_config names the weight {unknown[0]!r}, which is not trained; allowed is one of "
            f"{', '.join(parameters)}."
        )
    rest = [name for name in parameters if name not in named]
    return [*groups, (config.defaults, rest)]


def _optimizer(
    config: _OptimizerConfig, groups: list[tuple[Mapping[str, Any], list[str]]]
) -> functions.Optimizer:
    """Return the optimizer of torch2ort.optim."""
    if config.name == "SGDOptimizer":
        return functions.SGD(config.lr)
    kind = functions.AdamW if config.name == "AdamOptimizer" else functions.Lamb
    own = [
        {"params": frozenset(names).__contains__, **_settings(config, group)} for group, names in groups[:-1]
    ]
    return kind(lr=config.lr, groups=own, **_settings(config, config.defaults))


def _settings(config: _OptimizerConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters by their names in torch2ort.optim."""
    settings = {
        "betas": (values["alpha"], values["beta"]),
        "eps": values["epsilon"],
        "weight_decay": 0.0 if _decays_late(values) else values["lambda"],
        "bias_correction": values["do_bias_correction"],
    }
    if config.name == "LambOptimizer":
        settings |= {"min_ratio": values["ratio_min"], "max_ratio": values["ratio_max"]}
    return settings


def _decays_late(values: Mapping[str, Any]) -> bool:
    return values.get("weight_decay_mode") == AdamConfig.DecayMode.AFTER_WEIGHT_UPDATE


def finite(parameters: Mapping[str, torch.nn.Parameter]) -> bool:
    """Return True if no gradient contains an infinity or NaN."""
    flags = [torch.isfinite(p.grad).all() for p in parameters.values() if p.grad is not None]
    return bool(torch.stack(flags).all()) if flags else True
