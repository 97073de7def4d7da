"""The information about a step for schedulers, loss scalers and users."""

from __future__ import annotations

from torch2ort import OptionError
from torch2ort.trainer.optim.config import _OptimizerConfig


class TrainStepInfo:
    """The progress of a training.

    Args:
        optimizer_config: the optimizer's hyperparameters.
        all_finite: True if the gradients of the last update were all finite.
        fetches: names of the outputs that a step returns; if empty, it returns all.
        optimization_step: weight updates so far.
        step: calls of ``train_step`` so far.

    Raises:
        OptionError: an argument of another type, or a number below 0.

    >>> from torch2ort.trainer import optim
    >>> TrainStepInfo(optim.SGDConfig(lr=0.01)).all_finite
    True
    """

    def __init__(
        self,
        optimizer_config: _OptimizerConfig,
        all_finite: bool = True,
        fetches: list[str] | None = None,
        optimization_step: int = 0,
        step: int = 0,
    ) -> None:
        if not isinstance(optimizer_config, _OptimizerConfig):
            raise OptionError(
                f"optimizer_config is a {type(optimizer_config).__name__}; allowed is an AdamConfig, "
                f"LambConfig or "
                f"SGDConfig."
            )
        if not isinstance(all_finite, bool):
            raise OptionError(f"all_finite is {all_finite!r}; allowed is True or False.")
        fetches = [] if fetches is None else fetches
        if not isinstance(fetches, list) or not all(isinstance(name, str) for name in fetches):
            raise OptionError(f"fetches is {fetches!r}; allowed is a list of outputs' names.")
        for name, value in (("optimization_step", optimization_step), ("step", step)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise OptionError(f"{name} is {value!r}; allowed is an integer of at least 0.")
        self.optimizer_config = optimizer_config
        self.all_finite = all_finite
        self.fetches = fetches
        self.optimization_step = optimization_step
        self.step = step
