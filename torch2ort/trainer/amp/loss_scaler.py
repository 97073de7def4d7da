"""Scales of a loss, by which its gradients in float16 neither vanish nor overflow."""

from __future__ import annotations

import math

from torch2ort import OptionError
from torch2ort.trainer.step_info import TrainStepInfo


class LossScaler:
    """A constant scale; a subclass that overrides :meth:`update` implements another rule.

    Args:
        loss_scale: a finite number above 0.

    Raises:
        OptionError: `loss_scale` is no such number.
    """

    def __init__(self, loss_scale: float) -> None:
        self._input_name: str | None = None
        self.loss_scale = loss_scale
        self._initial_loss_scale = self._loss_scale

    @property
    def input_name(self) -> str | None:
        """The name of the scale among a graph's inputs; unused, and supported for code that sets it."""
        return self._input_name

    @input_name.setter
    def input_name(self, input_name: str) -> None:
        if not isinstance(input_name, str) or not input_name:
            raise OptionError(f"input_name is {input_name!r}; allowed is a name.")
        self._input_name = input_name

    @property
    def loss_scale(self) -> float:
        """The scale of the next step."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, loss_scale: float) -> None:
        number = isinstance(loss_scale, (int, float)) and not isinstance(loss_scale, bool)
        if not number or not loss_scale > 0 or math.isinf(loss_scale):
            raise OptionError(f"loss_scale is {loss_scale!r}; allowed is a finite number above 0.")
        self._loss_scale = float(loss_scale)

    def reset(self) -> None:
        """Reset to the first scale."""
        self._loss_scale = self._initial_loss_scale

    def update(self, train_step_info: TrainStepInfo) -> float:
        """Set the next step's scale; the trainer calls it after each step.

        Args:
            train_step_info: its ``all_finite`` is True if all gradients of that step were finite.

        Returns:
            The scale of the next step.
        """
        return self.loss_scale

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint: the numbers among the attributes."""
        return {
            name: value
            for name, value in vars(self).items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Load a state that :meth:`state_dict` returned."""
        vars(self).update(state)


class DynamicLossScaler(LossScaler):
    """A scale that is halved when gradients overflow, and doubled after many steps without overflow.

    Args:
        automatic_update: False to keep :meth:`update` from changing the scale.
        loss_scale: the first scale.
        up_scale_window: steps without overflow before the scale is doubled.
        min_loss_scale: the scale is not halved below it.
        max_loss_scale: the scale is not doubled above it.

    Raises:
        OptionError: a value that is not allowed.

    >>> DynamicLossScaler().loss_scale
    65536.0
    """

    def __init__(
        self,
        automatic_update: bool = True,
        loss_scale: float = float(1 << 16),
        up_scale_window: int = 2000,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = float(1 << 24),
    ) -> None:
        super().__init__(loss_scale)
        if not isinstance(automatic_update, bool):
            raise OptionError(f"automatic_update is {automatic_update!r}; allowed is True or False.")
        if not isinstance(up_scale_window, int) or isinstance(up_scale_window, bool) or up_scale_window < 1:
            raise OptionError(f"up_scale_window is {up_scale_window!r}; allowed is an integer of at least 1.")
        for name, value in (("min_loss_scale", min_loss_scale), ("max_loss_scale", max_loss_scale)):
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
                raise OptionError(f"{name} is {value!r}; allowed is a number above 0.")
        self.automatic_update = automatic_update
        self.up_scale_window = up_scale_window
        self.min_loss_scale = min_loss_scale
        self.max_loss_scale = max_loss_scale
        self._stable_steps_count = 0

    def reset(self) -> None:
        """Reset to the first scale, and the count of steps to 0."""
        super().reset()
        self._stable_steps_count = 0

    def update(self, train_step_info: TrainStepInfo) -> float:
        """See :meth:`LossScaler.update`."""
        if not self.automatic_update:
            return self.loss_scale
        if not train_step_info.all_finite:
            self._stable_steps_count = 0
            self.loss_scale = max(self.min_loss_scale, self.loss_scale / 2)
            return self.loss_scale
        self._stable_steps_count += 1
        if self._stable_steps_count >= self.up_scale_window:
            self._stable_steps_count = 0
            self.loss_scale = min(self.max_loss_scale, self.loss_scale * 2)
        return self.loss_scale
