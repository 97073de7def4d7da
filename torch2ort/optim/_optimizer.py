"""The base of all optimizers: groups of parameters with their own settings, and clipping of gradients."""

from __future__ import annotations

import fnmatch
import functools
import math
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeAlias

import torch

from torch2ort.errors import OptionError

Tensors: TypeAlias = Mapping[str, torch.Tensor]
# Name of a state -> one tensor, or one for each parameter by the parameter's name.
State: TypeAlias = Mapping[str, Any]
Settings: TypeAlias = Mapping[str, Any]
# A parameter after a step, and its state by the state's name.
Updated: TypeAlias = tuple[torch.Tensor, dict[str, torch.Tensor]]

# torch.nn.utils.clip_grad_norm_ adds this number to the norm.
_SMALL = 1e-6
_SWITCHES = ("amsgrad", "bias_correction", "nesterov")


class At(NamedTuple):
    """The learning rate, shared state and settings of a parameter in a step.

    Attributes:
        lr: its learning rate: float32, shape ().
        shared: the state that all parameters share, after this step.
        settings: its settings.
    """

    lr: torch.Tensor
    shared: Tensors
    settings: Settings


@dataclass(frozen=True, eq=False, repr=False)
class Optimizer:
    """An optimizer as a function of tensors: it changes none of them, and can be traced into a graph.

    Each optimizer has further settings, which a group may name.

    Args:
        lr: initial learning rate.
        groups: dicts with ``"params"`` (a name, a glob or several of them, or a predicate over names) and the
            settings of those parameters, which replace the optimizer's. A parameter is in the first group
            that matches its name.
        max_grad_norm: the total norm to which all gradients are clipped, before any other computation.
        max_grad_value: the value to which each number of a gradient is clipped, on both sides of zero.

    Raises:
        OptionError: a setting is unknown or has a value that is not allowed.
    """

    lr: float
    groups: Sequence[Mapping[str, Any]] = field(default=(), kw_only=True)
    max_grad_norm: float | None = field(default=None, kw_only=True)
    max_grad_value: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self._check_all(self._settings)
        for what, limit in (("max_grad_norm", self.max_grad_norm), ("max_grad_value", self.max_grad_value)):
            if limit is not None:
                self._need(_is_number(limit) and limit > 0, what, limit, "a number above 0, or None")
        listed = isinstance(self.groups, Sequence) and all(isinstance(one, Mapping) for one in self.groups)
        self._need(listed, "groups", self.groups, "a list of dicts")
        # Later changes of the caller's dicts have no effect.
        object.__setattr__(self, "groups", tuple(map(dict, self.groups)))
        for index, group in enumerate(self.groups):
            self._check_group(index, group)

    @functools.cached_property
    def _name(self) -> str:
        return type(self).__name__

    @functools.cached_property
    def _settings(self) -> Settings:
        """The settings of parameters that no group overrides."""
        return {one.name: getattr(self, one.name) for one in fields(self) if not one.kw_only}

    @functools.cached_property
    def _settings_by_group(self) -> list[tuple[Callable[[str], bool], Settings]]:
        return [(matcher(group["params"]), self._with(group)) for group in self.groups]

    def _with(self, group: Mapping[str, Any]) -> Settings:
        own = {key: value for key, value in group.items() if key != "params"}
        return {**self._settings, **own}

    def init(self, parameters: Tensors) -> dict[str, Any]:
        """Return the state before the first step.

        Args:
            parameters: name -> tensor.
        """
        raise NotImplementedError

    def __call__(
        self, parameters: Tensors, gradients: Tensors, state: State, lr: torch.Tensor | float
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Compute one step.

        Args:
            parameters: name -> tensor.
            gradients: name -> tensor of the parameter's shape and dtype. A parameter without a gradient does
                not change, and neither does its state.
            state: the state that :meth:`init` or the last step returned.
            lr: the learning rate, a number or a tensor of shape () in float32; groups scale it.

        Returns:
            The new parameters and the new state, as dicts of new tensors.
        """
        rate = torch.as_tensor(lr, dtype=torch.float32)
        clipped = self._clip(gradients)
        shared = self._shared_state(state)
        found = {name: dict(value) for name, value in state.items() if isinstance(value, Mapping)}
        result = dict(parameters)
        for name, gradient in clipped.items():
            settings = self._settings_of(name)
            scale = self._scale(settings)
            own = {what: values[name] for what, values in found.items() if name in values}
            parameter = parameters[name]
            scaled = rate if scale == 1 else rate * scale
            new, kept = self._update(parameter, gradient, own, At(scaled, shared, settings))
            result[name] = new.to(parameter.dtype)
            for what, value in kept.items():
                found[what][name] = value
        return result, {**shared, **found}

    def check_names(self, names: Collection[str]) -> None:
        """Refuse groups that name an unknown parameter; a glob may match no parameter.

        Args:
            names: of all parameters.

        Raises:
            OptionError: a group names an unknown parameter.
        """
        for index, group in enumerate(self.groups):
            named = group["params"]
            for one in [] if callable(named) else [named] if isinstance(named, str) else named:
                if one not in names and not any(sign in one for sign in "*?["):
                    raise OptionError(
                        f"{self._name}: groups[{index}] names {one!r}, which is not a parameter; expected "
                        f"some of {sorted(names)}"
                    )

    def _shared_state(self, state: State) -> dict[str, torch.Tensor]:
        """Return the state that all parameters share, after this step: the number of steps."""
        return {"step": state["step"] + 1} if "step" in state else {}

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, state: Tensors, at: At) -> Updated:
        """Return one parameter after the step, and its state."""
        raise NotImplementedError

    def _check(self, settings: Settings) -> None:
        """Refuse values that are not allowed.

        Raises:
            OptionError: a value is not allowed.
        """

    def _check_all(self, settings: Settings) -> None:
        for what, value in settings.items():
            self._check_kind(what, value)
        lr, decay = settings["lr"], settings.get("weight_decay", 0.0)
        self._need(math.isfinite(lr) and lr >= 0, "lr", lr, "a number that is not negative")
        self._need(decay >= 0, "weight_decay", decay, "a number that is not negative")
        for beta in settings.get("betas", ()):
            self._need(0 <= beta < 1, "betas", settings["betas"], "two numbers from 0 to below 1")
        self._check(settings)

    def _check_kind(self, what: str, value: Any) -> None:
        if what in _SWITCHES:
            self._need(isinstance(value, bool), what, value, "True or False")
        elif what == "betas":
            pair = isinstance(value, Sequence) and len(value) == 2 and all(map(_is_number, value))
            self._need(pair, what, value, "two numbers from 0 to below 1")
        else:
            self._need(_is_number(value), what, value, "a number")

    def _need(self, holds: bool, what: str, given: object, expected: str) -> None:
        if not holds:
            raise OptionError(f"{self._name}({what}={given!r}): expected {expected}")

    def _check_group(self, index: int, group: Mapping[str, Any]) -> None:
        unknown = sorted(group.keys() - self._settings.keys() - {"params"})
        if "params" not in group or unknown:
            lacks = f"has {unknown[0]!r}" if unknown else "has no 'params'"
            raise OptionError(
                f"{self._name}: groups[{index}] {lacks}; expected 'params' (a name, a glob, several of them "
                f"or a predicate) and some of {sorted(self._settings)}"
            )
        matcher(group["params"])
        settings = self._with(group)
        self._check_all(settings)
        if settings["lr"] != self.lr and not self.lr:
            raise OptionError(
                f"{self._name}: groups[{index}] has lr={settings['lr']!r}, a multiple of the optimizer's "
                f"own, which is 0; expected an lr above 0 there"
            )

    def _settings_of(self, name: str) -> Settings:
        return next((settings for holds, settings in self._settings_by_group if holds(name)), self._settings)

    def _scale(self, settings: Settings) -> float:
        """Return the factor of a group on the learning rate, which is an argument of each step."""
        return 1.0 if settings["lr"] == self.lr else float(settings["lr"] / self.lr)

    def _clip(self, gradients: Tensors) -> dict[str, torch.Tensor]:
        clipped = {name: value for name, value in gradients.items() if value is not None}
        if self.max_grad_norm is not None and clipped:
            norms = [torch.linalg.vector_norm(value) for value in clipped.values()]
            total = torch.linalg.vector_norm(torch.stack(norms))
            factor = torch.clamp(self.max_grad_norm / (total + _SMALL), max=1.0)
            clipped = {name: value * factor.to(value.dtype) for name, value in clipped.items()}
        if self.max_grad_value is not None:
            limit = self.max_grad_value
            clipped = {name: torch.clamp(value, -limit, limit) for name, value in clipped.items()}
        return clipped

    def __repr__(self) -> str:
        return f"{self._name}({', '.join(f'{key}={value!r}' for key, value in self._settings.items())})"


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def matcher(patterns: Any) -> Callable[[str], bool]:
    """Return a predicate over names.

    Args:
        patterns: a name, a glob, several of them, or a predicate.

    Raises:
        OptionError: it is something else.
    """
    if callable(patterns):
        return lambda name: bool(patterns(name))
    given = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(given, Sequence) or not all(isinstance(one, str) for one in given):
        raise OptionError(
            f"{patterns!r}: expected a name, a glob, several of them, or a predicate over names"
        )
    wanted = tuple(given)
    return lambda name: any(name == one or fnmatch.fnmatchcase(name, one) for one in wanted)


def zeros(parameters: Tensors) -> dict[str, torch.Tensor]:
    """Return a tensor of zeros for each parameter."""
    return {name: torch.zeros_like(value, requires_grad=False) for name, value in parameters.items()}


def no_steps(parameters: Tensors) -> torch.Tensor:
    """Return the number of steps before the first, 0: float32, shape (), on the device of the parameters."""
    device = next((value.device for value in parameters.values()), None)
    return torch.zeros((), dtype=torch.float32, device=device)


def missing_to_one(beta: float, step: torch.Tensor) -> torch.Tensor:
    """Return ``1 - beta ** step`` in float64: float32 would lose most of its digits in the first steps."""
    if beta == 0:
        return torch.ones_like(step, dtype=torch.float64)
    # exp is used as a power of two tensors is less exact on some devices.
    return 1 - torch.exp(step.to(torch.float64) * math.log(beta))
