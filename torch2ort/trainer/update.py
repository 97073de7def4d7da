"""Updates of weights: clipping, and an optimizer of torch2ort.optim as a config describes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torch2ort import optim as functions
from torch2ort.errors import OptionError
from torch2ort.trainer.optim.config import AdamConfig, _OptimizerConfig

# What a state of torch2ort.optim is called in a trainer's state.
MOMENTS = {"exp_avg": "Moment_1", "exp_avg_sq": "Moment_2"}
STEP = "step"


class Update:
    """The optimizer and its state.

    Args:
        config: hyperparameters.
        parameters: the weights that are trained, by name; changed in place.
        owned: names of those that this process updates; the state is theirs alone.
        clips: whether the norm of the gradients is limited, for Adam and LAMB.

    Raises:
        OptionError: a group names a weight that is not trained.

    Attributes:
        state: of the optimizer, as :mod:`torch2ort.optim` has it.
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
        self._groups = _groups(config, parameters)
        self._clips = clips and config.name != "SGDOptimizer"
        self._optimizer = _optimizer(config, self._groups)
        self.state: dict[str, Any] = self._optimizer.init(dict(owned))

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update the weights of this process by their gradients; one without a gradient stays as it is."""
        if self._clips:
            self._clip()
        gradients = {name: p.grad for name, p in self._owned.items() if p.grad is not None}
        present = {name: self._owned[name].detach() for name in gradients}
        updated, self.state = self._optimizer(present, gradients, self.state, lr)
        late = {name: values for values, names in self._groups if _decays_late(values) for name in names}
        for name, value in updated.items():
            if name in late:
                value = value * (1 - lr * late[name]["lambda"])
            self._owned[name].copy_(value)

    def _clip(self) -> None:
        """Limit the norm of all gradients together, for each group to its own limit."""
        present = [p.grad for p in self._parameters.values() if p.grad is not None]
        total = torch.nn.utils.get_total_norm(present)
        for values, names in self._groups:
            mine = [self._parameters[name] for name in names]
            torch.nn.utils.clip_grads_with_norm_(mine, values["max_norm_clip"], total)


def _groups(
    config: _OptimizerConfig, parameters: Mapping[str, torch.nn.Parameter]
) -> list[tuple[Mapping[str, Any], list[str]]]:
    """Hyperparameters, and the names of the weights that have them."""
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
    """The function of torch2ort.optim."""
    if config.name == "SGDOptimizer":
        return functions.SGD(config.lr)
    kind = functions.AdamW if config.name == "AdamOptimizer" else functions.Lamb
    own = [
        {"params": frozenset(names).__contains__, **_settings(config, group)} for group, names in groups[:-1]
    ]
    return kind(lr=config.lr, groups=own, **_settings(config, config.defaults))


def _settings(config: _OptimizerConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters by the names of torch2ort.optim."""
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
    """Tell whether no gradient has an infinity or what is no number."""
    flags = [torch.isfinite(p.grad).all() for p in parameters.values() if p.grad is not None]
    return bool(torch.stack(flags).all()) if flags else True


def gradients(parameters: Mapping[str, torch.nn.Parameter]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the gradients that there are, with the names of their weights."""
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            yield name, parameter.grad
