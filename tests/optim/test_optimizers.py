"""Each optimizer against torch.optim's over 50 steps, LAMB and Lion against their papers."""

from __future__ import annotations

import pytest
import torch

from torch2ort import optim
from torch2ort.errors import OptionError

STEPS = 50


def started() -> dict[str, torch.Tensor]:
    """Parameters of several ranks."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"0.weight": (4, 3), "0.bias": (4,), "scale": (), "unused": (2,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def gradient_of(parameters: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    """Gradients that depend on the parameters; one parameter has none."""
    generator = torch.Generator().manual_seed(step)
    return {
        name: 0.3 * value + torch.randn(value.shape, generator=generator)
        for name, value in parameters.items()
        if name != "unused"
    }


def rate(step: int) -> float:
    """A learning rate that changes with the step."""
    return 0.01 * (1 + step % 3)


def ours(optimizer: optim.Optimizer) -> dict[str, torch.Tensor]:
    parameters = started()
    state = optimizer.init(parameters)
    for step in range(STEPS):
        before = {name: value.clone() for name, value in parameters.items()}
        given, gradients = dict(parameters), gradient_of(parameters, step)
        parameters, state = optimizer(parameters, gradients, state, torch.tensor(rate(step)))
        assert all(torch.equal(given[name], value) for name, value in before.items())
    return parameters


def torchs(kind: type[torch.optim.Optimizer], clip=None, groups=None, **settings) -> dict[str, torch.Tensor]:
    parameters = {name: torch.nn.Parameter(value) for name, value in started().items()}
    chosen = groups(parameters) if groups else list(parameters.values())
    optimizer = kind(chosen, **settings)
    scales = [group["lr"] / 0.01 for group in optimizer.param_groups]
    for step in range(STEPS):
        gradients = gradient_of({name: p.detach() for name, p in parameters.items()}, step)
        for name, gradient in gradients.items():
            parameters[name].grad = gradient
        if clip:
            clip([p for p in parameters.values() if p.grad is not None])
        for group, scale in zip(optimizer.param_groups, scales, strict=True):
            group["lr"] = rate(step) * scale
        optimizer.step()
    return {name: p.detach() for name, p in parameters.items()}


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("SGD", {}),
        ("SGD", {"momentum": 0.9, "weight_decay": 0.1}),
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("SGD", {"momentum": 0.9, "dampening": 0.3}),
        ("Adam", {}),
        ("Adam", {"betas": (0.8, 0.95), "weight_decay": 0.1, "eps": 1e-3}),
        ("Adam", {"amsgrad": True}),
        ("AdamW", {}),
        ("AdamW", {"weight_decay": 0.3, "amsgrad": True}),
        ("Adagrad", {}),
        (
            "Adagrad",
            {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.2, "eps": 1e-4},
        ),
    ],
    ids=str,
)
def test_50_steps_are_those_of_torch(name, settings):
    found = ours(getattr(optim, name)(lr=0.01, **settings))
    assert_equal(found, torchs(getattr(torch.optim, name), lr=0.01, **settings))


def test_gradients_are_clipped_by_their_common_norm_as_torch_does():
    found = ours(optim.AdamW(lr=0.01, max_grad_norm=0.5))
    clip = lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.5)  # noqa: E731
    assert_equal(found, torchs(torch.optim.AdamW, clip, lr=0.01))


def test_gradients_are_clipped_by_value_as_torch_does():
    found = ours(optim.SGD(lr=0.01, momentum=0.5, max_grad_value=0.2))
    clip = lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 0.2)  # noqa: E731
    assert_equal(found, torchs(torch.optim.SGD, clip, lr=0.01, momentum=0.5))


def test_a_group_has_settings_of_its_own():
    found = ours(
        optim.AdamW(
            lr=0.01,
            groups=[{"params": "*.bias", "weight_decay": 0.0, "lr": 0.02}, {"params": ["scale"], "eps": 0.1}],
        )
    )

    def groups(parameters):
        return [
            {"params": [parameters["0.bias"]], "weight_decay": 0.0, "lr": 0.02},
            {"params": [parameters["scale"]], "eps": 0.1},
            {"params": [parameters["0.weight"], parameters["unused"]]},
        ]

    assert_equal(found, torchs(torch.optim.AdamW, groups=groups, lr=0.01))


def test_what_the_caller_does_to_a_group_later_changes_nothing():
    group = {"params": "*.bias", "lr": 0.02}
    changed, kept = optim.SGD(lr=0.01, groups=[group]), optim.SGD(lr=0.01, groups=[dict(group)])
    group["lr"] = 0.5
    assert_equal(ours(changed), ours(kept))


def lamb(name: str, parameters, gradient, memory, step: int) -> torch.Tensor:
    """Algorithm 2 of the paper for one parameter, in float64."""
    first, second = memory.get(name, (torch.zeros_like(gradient), torch.zeros_like(gradient)))
    first = 0.9 * first + 0.1 * gradient
    second = 0.999 * second + 0.001 * gradient**2
    memory[name] = first, second
    ratio = (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-6)
    direction = ratio + 0.1 * parameters[name]
    return parameters[name] - rate(step - 1) * parameters[name].norm() / direction.norm() * direction


def lion(name: str, parameters, gradient, memory, step: int) -> torch.Tensor:
    """Program 1 of the paper for one parameter, in float64."""
    mean = memory.get(name, torch.zeros_like(gradient))
    memory[name] = 0.99 * mean + 0.01 * gradient
    direction = torch.sign(0.9 * mean + 0.1 * gradient) + 0.1 * parameters[name]
    return parameters[name] - rate(step - 1) * direction


@pytest.mark.parametrize(("name", "reference"), [("Lamb", lamb), ("Lion", lion)])
def test_50_steps_are_those_of_the_paper(name, reference):
    parameters = {key: value.double() for key, value in started().items()}
    memory = {}
    for step in range(STEPS):
        gradients = gradient_of({key: value.float() for key, value in parameters.items()}, step)
        for key, gradient in gradients.items():
            parameters[key] = reference(key, parameters, gradient.double(), memory, step + 1)
    found = ours(getattr(optim, name)(lr=0.01, weight_decay=0.1))
    for key, value in parameters.items():
        torch.testing.assert_close(found[key].double(), value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: optim.SGD(lr=-1.0), "SGD(lr=-1.0): expected a number that is not negative"),
        (
            lambda: optim.Adam(betas=(0.9, 1.0)),
            "Adam(betas=(0.9, 1.0)): expected two numbers from 0 to below 1",
        ),
        (
            lambda: optim.SGD(nesterov=True),
            "SGD(nesterov=True): expected a momentum above 0 and no dampening with it",
        ),
        (
            lambda: optim.Lion(max_grad_norm=0),
            "Lion(max_grad_norm=0): expected a number above 0, or None",
        ),
        (
            lambda: optim.Lion(groups=[{"params": "*", "eps": 1}]),
            "Lion: groups[0] has 'eps'; expected 'params' (a name, a glob, several of them or a predicate) "
            "and some of ['betas', 'lr', 'weight_decay']",
        ),
        (
            lambda: optim.Lion(groups=[{"params": 3}]),
            "3: expected a name, a glob, several of them, or a predicate over names",
        ),
        (lambda: optim.AdamW(lr="fast"), "AdamW(lr='fast'): expected a number"),
        (lambda: optim.Adam(betas=(0.9,)), "Adam(betas=(0.9,)): expected two numbers from 0 to below 1"),
        (lambda: optim.Adam(amsgrad="yes"), "Adam(amsgrad='yes'): expected True or False"),
        (lambda: optim.SGD(dampening=None), "SGD(dampening=None): expected a number"),
        (
            lambda: optim.Lion(max_grad_norm="1"),
            "Lion(max_grad_norm='1'): expected a number above 0, or None",
        ),
        (
            lambda: optim.Lion(groups={"params": "*"}),
            "Lion(groups={'params': '*'}): expected a list of dicts",
        ),
    ],
)
def test_a_setting_that_is_not_allowed_is_named(make, sentence):
    with pytest.raises(OptionError) as raised:
        make()
    assert str(raised.value) == sentence
