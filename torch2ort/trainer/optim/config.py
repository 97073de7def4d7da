"""The hyperparameters of SGD, Adam and LAMB, for all weights and by groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import IntEnum, unique
from typing import Any

from torch2ort import OptionError

NAMES = ("SGDOptimizer", "AdamOptimizer", "LambOptimizer")


class _OptimizerConfig:
    """Hyperparameters of one optimizer.

    Args:
        name: ``"SGDOptimizer"``, ``"AdamOptimizer"`` or ``"LambOptimizer"``.
        params: groups of weights with their own values: dicts of ``"params"``, a list of weights' names,
            and of hyperparameters. Weights that no group names have the values of `defaults`.
        defaults: every hyperparameter and its value; ``"lr"`` is one of them.

    Raises:
        OptionError: an argument has the wrong type, or a group has a hyperparameter that `defaults` lacks.

    Attributes:
        name: see above.
        lr: the learning rate without a scheduler.
        defaults: see above.
        params: the groups, each with all hyperparameters.
    """

    def __init__(self, name: str, params: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]) -> None:
        if name not in NAMES:
            raise OptionError(f"name is {name!r}; allowed is one of {', '.join(NAMES)}.")
        if not isinstance(defaults, Mapping):
            raise OptionError(f"defaults is a {type(defaults).__name__}; allowed is a dict.")
        check_number("lr", defaults.get("lr"))
        if not isinstance(params, list):
            raise OptionError(f"params is a {type(params).__name__}; allowed is a list of dicts.")
        self.name = name
        self.lr = float(defaults["lr"])
        self.defaults = dict(defaults)
        self.params = [self._group(index, group) for index, group in enumerate(params)]
        self._refuse_repeated_names()

    def _group(self, index: int, group: Any) -> dict[str, Any]:
        """Return the group, with the defaults of the hyperparameters that it does not name."""
        where = f"params[{index}]"
        names = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(group) < 2:
            raise OptionError(
                f"{where} is {group!r}; allowed is a dict with 'params', a list of weights' names, and "
                f"at least one "
                f"hyperparameter of their own."
            )
        values = {spelled(key): value for key, value in group.items() if key != "params"}
        if "lr" in values:
            raise OptionError(
                f"{where} has 'lr', which all weights share; give it to {type(self).__name__}, or use a "
                f"scheduler."
            )
        unknown = sorted(values.keys() - self.defaults.keys())
        if unknown:
            raise OptionError(
                f"{where} has {unknown[0]!r}, which {self.name} does not know; allowed is one of "
                f"{', '.join(sorted(self.defaults.keys() - {'lr'}))}."
            )
        return {**self.defaults, **values, "params": list(names)}

    def _refuse_repeated_names(self) -> None:
        seen: set[str] = set()
        for index, group in enumerate(self.params):
            for name in group["params"]:
                if name in seen:
                    raise OptionError(f"params[{index}] names {name!r} again; name each weight once.")
                seen.add(name)


def spelled(key: str) -> str:
    """Return the name of a hyperparameter: ``lambda``, a keyword in Python, for ``lambda_coef``."""
    return key.removesuffix("_coef")


def check_number(name: str, value: object, *, infinite: bool = False) -> None:
    """Check that a value is a number of at least 0.

    Raises:
        OptionError: it is another value, which the error contains.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not (infinite or (math.isfinite(value) and value >= 0)):  # type: ignore[arg-type, operator]
        raise OptionError(f"{name} is {value!r}; allowed is a number of at least 0.")


def _check_norm(value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise OptionError(f"max_norm_clip is {value!r}; allowed is a number above 0.")


def _check_switch(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise OptionError(f"{name} is {value!r}; allowed is True or False.")


def _groups(params: Any, param_groups: Any) -> Any:
    """Return the groups, which the reference accepts under either of two names."""
    if param_groups is None:
        return [] if params is None else params
    if params:
        raise OptionError("params and param_groups are two names of one argument; give one of them.")
    return param_groups


class _MomentsConfig(_OptimizerConfig):
    """The common part of Adam and LAMB: running means of gradients and of their squares, and a clipped norm.

    Args:
        name: the optimizer's name.
        groups: the arguments ``params`` and ``param_groups``.
        values: every hyperparameter; each becomes an attribute, too.

    Raises:
        OptionError: a value that is not allowed.
    """

    alpha: float
    beta: float
    lambda_coef: float
    epsilon: float
    max_norm_clip: float
    do_bias_correction: bool

    def __init__(self, name: str, groups: tuple[Any, Any], **values: Any) -> None:
        super().__init__(name, _groups(*groups), {spelled(key): value for key, value in values.items()})
        vars(self).update({key: value for key, value in values.items() if key != "lr"})
        for checked in (self.defaults, *self.params):
            self._check(checked)

    def _check(self, values: Mapping[str, Any]) -> None:
        """Raise an error for a value that is not allowed, of the defaults or of a group."""
        for name in ("alpha", "beta", "lambda", "epsilon"):
            check_number(name, values[name])
        _check_norm(values["max_norm_clip"])
        _check_switch("do_bias_correction", values["do_bias_correction"])


class SGDConfig(_OptimizerConfig):
    """Plain gradient descent: ``weight -= lr * gradient``.

    Args:
        params: an empty list; SGD has no groups.
        lr: learning rate.

    Raises:
        OptionError: a value that is not allowed.
    """

    def __init__(self, params: list[dict[str, Any]] | None = None, lr: float = 0.001) -> None:
        if params:
            raise OptionError(f"params is {params!r}; allowed is an empty list, as SGD has no groups.")
        super().__init__("SGDOptimizer", [] if params is None else params, {"lr": lr})


class AdamConfig(_MomentsConfig):
    """Adam, with weight decay separate from the gradient.

    Args:
        params: groups of weights with their own values; all groups share ``lr``.
        lr: learning rate.
        alpha: decay rate of the running mean of gradients.
        beta: decay rate of the running mean of squared gradients.
        lambda_coef: weight decay; ``lambda`` in a group.
        epsilon: added to the root of the mean of squares.
        max_norm_clip: largest norm of all gradients together, see ``utils.grad_norm_clip``.
        do_bias_correction: correct the means' bias towards 0 in the first steps.
        weight_decay_mode: :attr:`DecayMode.BEFORE_WEIGHT_UPDATE` decays the weight as it was before the
            step, as ``torch.optim.AdamW`` does. :attr:`DecayMode.AFTER_WEIGHT_UPDATE` decays the new weight,
            and adds `epsilon` before the correction of the means, as the AdamW of transformers did.
        param_groups: another name of `params`.

    Raises:
        OptionError: a value that is not allowed.
    """

    @unique
    class DecayMode(IntEnum):
        """The time of the weight decay in a step."""

        BEFORE_WEIGHT_UPDATE = 0
        AFTER_WEIGHT_UPDATE = 1

    weight_decay_mode: DecayMode

    def __init__(
        self,
        params: list[dict[str, Any]] | None = None,
        lr: float = 0.001,
        alpha: float = 0.9,
        beta: float = 0.999,
        lambda_coef: float = 0.0,
        epsilon: float = 1e-8,
        max_norm_clip: float = 1.0,
        do_bias_correction: bool = True,
        weight_decay_mode: DecayMode = DecayMode.BEFORE_WEIGHT_UPDATE,
        *,
        param_groups: list[dict[str, Any]] | None = None,
    ) -> None:
        super().__init__(
            "AdamOptimizer", (params, param_groups), lr=lr, alpha=alpha, beta=beta, lambda_coef=lambda_coef,
            epsilon=epsilon, max_norm_clip=max_norm_clip, do_bias_correction=do_bias_correction,
            weight_decay_mode=weight_decay_mode,
        )  # fmt: skip

    def _check(self, values: Mapping[str, Any]) -> None:
        super()._check(values)
        if not isinstance(values["weight_decay_mode"], AdamConfig.DecayMode):
            raise OptionError(
                f"weight_decay_mode is {values['weight_decay_mode']!r}; allowed is one of "
                f"AdamConfig.DecayMode."
            )


class LambConfig(_MomentsConfig):
    """LAMB: Adam's step of each weight, scaled by the ratio of the weight's norm to the step's.

    Args:
        params: groups of weights with their own values; all groups share ``lr``.
        lr: learning rate.
        alpha: decay rate of the running mean of gradients.
        beta: decay rate of the running mean of squared gradients.
        lambda_coef: weight decay, a part of the step whose norm is taken; ``lambda`` in a group.
        ratio_min: smallest ratio.
        ratio_max: largest ratio.
        epsilon: added to the root of the mean of squares.
        max_norm_clip: largest norm of all gradients together, see ``utils.grad_norm_clip``.
        do_bias_correction: correct the means' bias towards 0 in the first steps.
        param_groups: another name of `params`.

    Raises:
        OptionError: a value that is not allowed.
    """

    ratio_min: float
    ratio_max: float

    def __init__(
        self,
        params: list[dict[str, Any]] | None = None,
        lr: float = 0.001,
        alpha: float = 0.9,
        beta: float = 0.999,
        lambda_coef: float = 0.0,
        ratio_min: float = float("-inf"),
        ratio_max: float = float("inf"),
        epsilon: float = 1e-6,
        max_norm_clip: float = 1.0,
        do_bias_correction: bool = False,
        *,
        param_groups: list[dict[str, Any]] | None = None,
    ) -> None:
        super().__init__(
            "LambOptimizer", (params, param_groups), lr=lr, alpha=alpha, beta=beta, lambda_coef=lambda_coef,
            ratio_min=ratio_min, ratio_max=ratio_max, epsilon=epsilon, max_norm_clip=max_norm_clip,
            do_bias_correction=do_bias_correction,
        )  # fmt: skip

    def _check(self, values: Mapping[str, Any]) -> None:
        super()._check(values)
        for name in ("ratio_min", "ratio_max"):
            check_number(name, values[name], infinite=True)
        if not values["ratio_min"] <= values["ratio_max"]:
            raise OptionError(
                f"ratio_min is {values['ratio_min']!r}; allowed is at most ratio_max, "
                f"{values['ratio_max']!r}."
            )
