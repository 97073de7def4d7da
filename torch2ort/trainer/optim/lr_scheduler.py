"""Learning rates that depend on the number of weight updates."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torch2ort import OptionError

if TYPE_CHECKING:
    # That module imports optimizers itself.
    from torch2ort.trainer.step_info import TrainStepInfo


class _LRScheduler(ABC):
    """A rule for each step's learning rate; a subclass implements another rule."""

    def __init__(self) -> None:
        self._last_lr: list[float] = []

    def _step(self, train_step_info: TrainStepInfo) -> list[float]:
        """Compute the learning rate, and store it for :meth:`get_last_lr`."""
        self._last_lr = self.get_lr(train_step_info)
        return self._last_lr

    @abstractmethod
    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        """Return a list of one number, the learning rate of the step that `train_step_info` describes."""

    def get_last_lr(self) -> list[float]:
        """Return the last step's learning rate, as a list; an empty list before the first step."""
        return self._last_lr


class _WarmupLRScheduler(_LRScheduler):
    """A rate that rises from 0 to the optimizer's learning rate, then follows a curve.

    Args:
        total_steps: weight updates in the whole training, at least 1. A trainer needs it; options can be
            created without it.
        warmup: fraction of them in which the rate rises, at least 0 and below 1.

    Raises:
        OptionError: a value that is not allowed.
    """

    def __init__(self, total_steps: int | None = None, warmup: float = 0.002) -> None:
        super().__init__()
        if total_steps is not None and (
            not isinstance(total_steps, int) or isinstance(total_steps, bool) or total_steps < 1
        ):
            raise OptionError(f"total_steps is {total_steps!r}; allowed is an integer of at least 1.")
        if not _is_number(warmup) or not 0 <= warmup < 1:
            raise OptionError(f"warmup is {warmup!r}; allowed is a number from 0 on, below 1.")
        self.total_steps = total_steps
        self.warmup = warmup

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        """See the base class."""
        self._check()
        step, lr = train_step_info.optimization_step, train_step_info.optimizer_config.lr
        return [lr * (step / max(1, self._rise) if step < self._rise else self._curve(step, lr))]

    def _check(self) -> None:
        """Check that the length of the training is known.

        Raises:
            OptionError: ``total_steps`` is missing.
        """
        if self.total_steps is None:
            raise OptionError(
                f"{type(self).__name__} has no total_steps; give it the number of updates of weights in the "
                f"whole training."
            )

    @abstractmethod
    def _curve(self, step: int, lr: float) -> float:
        """Return the factor of the learning rate `lr` after the warm-up, in update `step`, counted from 0."""

    @property
    def _total(self) -> int:
        assert self.total_steps is not None  # see _check
        return self.total_steps

    @property
    def _rise(self) -> float:
        return self.warmup * self._total

    def _progress(self, step: int) -> float:
        """Return the completed fraction of the training after the warm-up: 0 at its start, 1 at its end."""
        return (step - self._rise) / max(1, self._total - self._rise)


class ConstantWarmupLRScheduler(_WarmupLRScheduler):
    """A rate that rises from 0 to the optimizer's learning rate, and stays there.

    Args and errors are those of :class:`LinearWarmupLRScheduler`.
    """

    def _curve(self, step: int, lr: float) -> float:
        return 1.0


class LinearWarmupLRScheduler(_WarmupLRScheduler):
    """A rate that rises from 0 to the optimizer's learning rate, and falls to 0 linearly.

    Args:
        total_steps: weight updates in the whole training, at least 1. A trainer needs it; options can be
            created without it.
        warmup: fraction of them in which the rate rises, at least 0 and below 1.

    Raises:
        OptionError: a value that is not allowed.
    """

    def _curve(self, step: int, lr: float) -> float:
        return max(0.0, (self._total - step) / max(1, self._total - self._rise))


class CosineWarmupLRScheduler(_WarmupLRScheduler):
    """A rate that rises from 0 to the optimizer's learning rate, and follows a cosine.

    Args:
        total_steps: as for :class:`LinearWarmupLRScheduler`.
        cycles: periods of the cosine after the warm-up; with 0.5 the rate falls to 0 once.
        warmup: fraction of the updates in which the rate rises, at least 0 and below 1.

    Raises:
        OptionError: a value that is not allowed.
    """

    def __init__(self, total_steps: int | None = None, cycles: float = 0.5, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)
        if not _is_number(cycles) or not cycles > 0:
            raise OptionError(f"cycles is {cycles!r}; allowed is a number above 0.")
        self.cycles = cycles

    def _curve(self, step: int, lr: float) -> float:
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * self.cycles * 2.0 * self._progress(step))))


class PolyWarmupLRScheduler(_WarmupLRScheduler):
    """A rate that rises from 0 to the optimizer's learning rate, and falls polynomially to `lr_end`.

    Args:
        total_steps: as for :class:`LinearWarmupLRScheduler`.
        lr_end: the learning rate at the end, below the optimizer's.
        power: the exponent of the remaining fraction of the training; 1 is a straight line.
        warmup: fraction of the updates in which the rate rises, at least 0 and below 1.

    Raises:
        OptionError: a value that is not allowed. An `lr_end` that is not below the optimizer's learning rate
            is reported in a step.
    """

    def __init__(
        self,
        total_steps: int | None = None,
        lr_end: float = 1e-7,
        power: float = 1.0,
        warmup: float = 0.002,
    ) -> None:
        super().__init__(total_steps, warmup)
        for name, value in (("lr_end", lr_end), ("power", power)):
            if not _is_number(value) or not value >= 0:
                raise OptionError(f"{name} is {value!r}; allowed is a number of at least 0.")
        self.lr_end = lr_end
        self.power = power

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        """See the base class."""
        lr = train_step_info.optimizer_config.lr
        if not lr > self.lr_end:
            raise OptionError(f"lr_end is {self.lr_end!r}; allowed is less than the optimizer's lr, {lr!r}.")
        return super().get_lr(train_step_info)

    def _curve(self, step: int, lr: float) -> float:
        if step > self._total:
            return self.lr_end / lr
        left = 1 - (step - self._rise) / (self._total - self._rise)
        return float(((lr - self.lr_end) * left**self.power + self.lr_end) / lr)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
