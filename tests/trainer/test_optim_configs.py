"""Optimizers' hyperparameters, learning rates, loss scales and step info: defaults, values and errors."""

from __future__ import annotations

import math

import pytest

from torch2ort.errors import OptionError
from torch2ort.trainer import TrainStepInfo, amp, optim

SCHEDULERS = optim.lr_scheduler


def rates(scheduler: object, steps: int = 10, lr: float = 1.0) -> list[float]:
    config = optim.SGDConfig(lr=lr)
    found = [scheduler._step(TrainStepInfo(config, optimization_step=step))[0] for step in range(steps)]
    assert scheduler.get_last_lr() == found[-1:]
    return found


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (optim.SGDConfig(), {"name": "SGDOptimizer", "lr": 0.001, "params": []}),
        (
            optim.AdamConfig(),
            {
                "name": "AdamOptimizer", "lr": 0.001, "alpha": 0.9, "beta": 0.999, "lambda_coef": 0.0,
                "epsilon": 1e-8, "max_norm_clip": 1.0, "do_bias_correction": True, "params": [],
                "weight_decay_mode": optim.AdamConfig.DecayMode.BEFORE_WEIGHT_UPDATE,
            },
        ),
        (
            optim.LambConfig(),
            {
                "name": "LambOptimizer", "lr": 0.001, "alpha": 0.9, "beta": 0.999, "lambda_coef": 0.0,
                "ratio_min": -math.inf, "ratio_max": math.inf, "epsilon": 1e-6, "max_norm_clip": 1.0,
                "do_bias_correction": False, "params": [],
            },
        ),
    ],
)  # fmt: skip
def test_a_config_has_documented_defaults(config: object, expected: dict[str, object]) -> None:
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize("name", ["params", "param_groups"])
def test_a_group_has_the_config_s_values_where_it_has_none_of_its_own(name: str) -> None:
    groups = [{"params": ["a", "b"], "alpha": 0.8, "lambda_coef": 0.1}]
    config = optim.LambConfig(**{name: groups}, alpha=0.7, beta=0.6)
    assert [config.params[0][key] for key in ("params", "alpha", "beta", "lambda")] == [
        ["a", "b"], 0.8, 0.6, 0.1,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.AdamConfig(lr=-1.0), "lr is -1.0; allowed is a number of at least 0."),
        (lambda: optim.AdamConfig(alpha="x"), "alpha is 'x'; allowed is a number of at least 0."),
        (lambda: optim.LambConfig(max_norm_clip=0), "max_norm_clip is 0; allowed is a number above 0."),
        (
            lambda: optim.LambConfig(do_bias_correction=1),
            "do_bias_correction is 1; allowed is True or False.",
        ),
        (
            lambda: optim.LambConfig(ratio_min=2.0, ratio_max=1.0),
            "ratio_min is 2.0; allowed is at most ratio_max, 1.0.",
        ),
        (
            lambda: optim.AdamConfig(weight_decay_mode=0),
            "weight_decay_mode is 0; allowed is one of AdamConfig.DecayMode.",
        ),
        (
            lambda: optim.SGDConfig([{"params": ["a"]}]),
            "params is [{'params': ['a']}]; allowed is an empty list, as SGD has no groups.",
        ),
        (
            lambda: optim.AdamConfig([{"params": ["a"], "lr": 0.1}]),
            "params[0] has 'lr', which all weights share; give it to AdamConfig, or use a scheduler.",
        ),
        (
            lambda: optim.AdamConfig([{"params": ["a"], "ratio_min": 0.1}]),
            "params[0] has 'ratio_min', which AdamOptimizer does not know; allowed is one of alpha, beta, "
            "do_bias_correction, epsilon, lambda, max_norm_clip, weight_decay_mode.",
        ),
        (
            lambda: optim.AdamConfig([{"params": "a", "alpha": 0.1}]),
            "params[0] is {'params': 'a', 'alpha': 0.1}; allowed is a dict with 'params', a list of weights' "
            "names, and at least one hyperparameter of their own.",
        ),
        (
            lambda: optim.AdamConfig([{"params": ["a", "a"], "alpha": 0.1}]),
            "params[0] names 'a' again; name each weight once.",
        ),
        (
            lambda: optim._OptimizerConfig("Foo", [], {"lr": 0.1}),
            "name is 'Foo'; allowed is one of SGDOptimizer, AdamOptimizer, LambOptimizer.",
        ),
        (
            lambda: SCHEDULERS.ConstantWarmupLRScheduler(0),
            "total_steps is 0; allowed is an integer of at least 1.",
        ),
        (
            lambda: SCHEDULERS.LinearWarmupLRScheduler(10, warmup=1.0),
            "warmup is 1.0; allowed is a number from 0 on, below 1.",
        ),
        (
            lambda: SCHEDULERS.CosineWarmupLRScheduler(10, cycles=0.0),
            "cycles is 0.0; allowed is a number above 0.",
        ),
        (
            lambda: SCHEDULERS.PolyWarmupLRScheduler(10, power=-1.0),
            "power is -1.0; allowed is a number of at least 0.",
        ),
        (
            lambda: rates(SCHEDULERS.PolyWarmupLRScheduler(10, lr_end=2.0)),
            "lr_end is 2.0; allowed is less than the optimizer's lr, 1.0.",
        ),
        (
            lambda: rates(SCHEDULERS.CosineWarmupLRScheduler()),
            "CosineWarmupLRScheduler has no total_steps; give it the number of updates of weights in the "
            "whole training.",
        ),
        (lambda: amp.LossScaler(0), "loss_scale is 0; allowed is a finite number above 0."),
        (
            lambda: amp.DynamicLossScaler(up_scale_window=0),
            "up_scale_window is 0; allowed is an integer of at least 1.",
        ),
        (
            lambda: TrainStepInfo(3),
            "optimizer_config is a int; allowed is an AdamConfig, LambConfig or SGDConfig.",
        ),
        (
            lambda: TrainStepInfo(optim.SGDConfig(), all_finite=1),
            "all_finite is 1; allowed is True or False.",
        ),
        (
            lambda: TrainStepInfo(optim.SGDConfig(), fetches="loss"),
            "fetches is 'loss'; allowed is a list of outputs' names.",
        ),
        (
            lambda: TrainStepInfo(optim.SGDConfig(), step=-1),
            "step is -1; allowed is an integer of at least 0.",
        ),
    ],
)  # fmt: skip
def test_a_value_that_is_not_allowed_is_refused(make: object, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        make()
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("ConstantWarmup", [0, 0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1, 1]),
        ("CosineWarmup", [0, 0.2, 0.4, 0.6, 0.8, 1, 0.9045085, 0.6545085, 0.3454915, 0.0954915]),
        ("LinearWarmup", [0, 0.2, 0.4, 0.6, 0.8, 1, 0.8, 0.6, 0.4, 0.2]),
        ("PolyWarmup", [0, 0.2, 0.4, 0.6, 0.8, 1, 0.8, 0.6, 0.4, 0.2]),
    ],
)
def test_a_rate_rises_from_0_and_follows_its_curve(kind: str, expected: list[float]) -> None:
    scheduler = getattr(SCHEDULERS, f"{kind}LRScheduler")(10, warmup=0.5)
    assert rates(scheduler) == pytest.approx(expected, abs=1e-6)


def test_a_polynomial_ends_at_its_last_rate() -> None:
    assert rates(SCHEDULERS.PolyWarmupLRScheduler(4, lr_end=0.1, power=2.0, warmup=0.0), 7) == pytest.approx(
        [1.0, 0.60625, 0.325, 0.15625, 0.1, 0.1, 0.1]
    )


def test_a_scheduler_of_one_s_own_computes_the_rate() -> None:
    class Halves(optim._LRScheduler):
        def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
            return [train_step_info.optimizer_config.lr / 2**train_step_info.optimization_step]

    assert rates(Halves(), 3) == [1.0, 0.5, 0.25]


def test_a_dynamic_scale_doubles_after_a_window_and_halves_at_an_overflow() -> None:
    scaler = amp.DynamicLossScaler(loss_scale=8, up_scale_window=2, min_loss_scale=4, max_loss_scale=16)
    fine, over = TrainStepInfo(optim.SGDConfig()), TrainStepInfo(optim.SGDConfig(), all_finite=False)
    found = [scaler.update(info) for info in (fine, fine, fine, fine, over, fine, over, over, fine, fine)]
    assert found == [8, 16, 16, 16, 8, 8, 4, 4, 4, 8]


def test_a_dynamic_scale_has_documented_defaults() -> None:
    scaler = amp.DynamicLossScaler()
    found = (scaler.automatic_update, scaler.loss_scale, scaler.up_scale_window)
    assert (*found, scaler.min_loss_scale, scaler.max_loss_scale) == (True, 65536.0, 2000, 1.0, 2.0**24)


def test_reset_returns_to_the_first_scale() -> None:
    scaler = amp.DynamicLossScaler(loss_scale=8)
    scaler.update(TrainStepInfo(optim.SGDConfig(), all_finite=False))
    scaler.reset()
    assert scaler.loss_scale == 8


@pytest.mark.parametrize(
    "scaler", [amp.LossScaler(4), amp.DynamicLossScaler(automatic_update=False, loss_scale=4)]
)
def test_a_static_scale_stays(scaler: amp.LossScaler) -> None:
    assert scaler.update(TrainStepInfo(optim.SGDConfig(), all_finite=False)) == 4


def test_step_info_has_documented_defaults() -> None:
    info = TrainStepInfo(optim.SGDConfig())
    assert (info.all_finite, info.fetches, info.optimization_step, info.step) == (True, [], 0, 0)
