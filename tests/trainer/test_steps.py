"""Steps of a trainer compared with the same loop in PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.functions import Square
from tests.trainer.models import DESCRIPTION, Net, batches, cross_entropy, eager, options, started, trainer
from torch2ort.errors import OptionError, SchemaMismatchError
from torch2ort.trainer import ORTTrainer, amp, optim

STEPS = 20


def with_torch(kind: Callable[..., torch.optim.Optimizer], **settings: Any) -> Callable[..., Any]:
    def make(model: torch.nn.Module) -> Callable[[float], None]:
        optimizer = kind([p for p in model.parameters() if p.requires_grad], **settings)

        def update(lr: float) -> None:
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()

        return update

    return make


def with_lamb(model: torch.nn.Module) -> Callable[[float], None]:
    """LAMB as in its paper, without bias correction, with weight decay 0.01."""
    state = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters() if p.requires_grad}

    @torch.no_grad()
    def update(lr: float) -> None:
        for p, (mean, square) in state.items():
            mean.mul_(0.9).add_(p.grad, alpha=0.1)
            square.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            direction = mean / (square.sqrt() + 1e-6) + 0.01 * p
            ratio = p.norm() / direction.norm() if p.norm() > 0 and direction.norm() > 0 else 1.0
            p.sub_(lr * ratio * direction)

    return update


def warmed_up(lr: float) -> Callable[[int], float]:
    """The rate of a linear warm-up over 4 of 10 updates."""
    return lambda update: lr * (update / 4 if update < 4 else (10 - update) / 6)


def assert_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    torch.testing.assert_close(dict(one.named_parameters()), dict(other.named_parameters()))


@pytest.mark.parametrize(
    ("config", "make", "clip"),
    [
        (optim.SGDConfig(lr=0.5), with_torch(torch.optim.SGD), None),
        (
            optim.AdamConfig(lr=0.05, lambda_coef=0.01, max_norm_clip=0.2),
            with_torch(torch.optim.AdamW, weight_decay=0.01),
            0.2,
        ),
        (optim.LambConfig(lr=0.05, lambda_coef=0.01, max_norm_clip=0.2), with_lamb, 0.2),
    ],
    ids=["sgd", "adam", "lamb"],
)
def test_20_steps_are_those_of_the_loop_in_torch(config: Any, make: Any, clip: float | None) -> None:
    settings = {"frozen": "first.bias", "accumulate": 2, "clip": clip, "rates": warmed_up(config.lr)}
    expected, losses = eager(STEPS, make, **settings)
    model = started()
    tried = trainer(
        model,
        config,
        batch={"gradient_accumulation_steps": 2},
        utils={"frozen_weights": ["first.bias"]},
        lr_scheduler=optim.lr_scheduler.LinearWarmupLRScheduler(10, warmup=0.4),
    )
    found = [tried.train_step(x, y)[0].item() for x, y in batches(STEPS)]
    assert found == pytest.approx(losses, rel=1e-5)
    assert_same(model, expected)
    assert torch.equal(model.first.bias, started().first.bias)
    assert tried._train_step_info.step == STEPS
    assert tried._train_step_info.optimization_step == STEPS // 2


@pytest.mark.parametrize(
    ("utils", "expected_clip"), [({}, 1e-3), ({"grad_norm_clip": False}, None)], ids=["default", "off"]
)
def test_clipping_is_on_unless_it_is_switched_off(
    utils: dict[str, bool], expected_clip: float | None
) -> None:
    config = optim.LambConfig(lr=0.1, lambda_coef=0.01, max_norm_clip=1e-3)
    expected, _ = eager(3, with_lamb, clip=expected_clip)
    model = started()
    tried = trainer(model, config, utils=utils)
    for x, y in batches(3):
        tried.train_step(x, y)
    assert_same(model, expected)


def test_groups_have_hyperparameters_of_their_own() -> None:
    def make(model: torch.nn.Module) -> Callable[[float], None]:
        groups = [
            {"params": [model.first.weight], "betas": (0.5, 0.999), "weight_decay": 0.1},
            {"params": [model.first.bias, *model.last.parameters()]},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.0)
        return lambda lr: optimizer.step() and None

    expected, _ = eager(5, make)
    model = started()
    groups = [{"params": ["first.weight"], "alpha": 0.5, "lambda": 0.1}]
    tried = trainer(model, optim.AdamConfig(groups, lr=0.1), utils={"grad_norm_clip": False})
    for x, y in batches(5):
        tried.train_step(x, y)
    assert_same(model, expected)


def test_weights_that_decay_after_the_update_and_means_that_are_not_corrected() -> None:
    def make(model: torch.nn.Module) -> Callable[[float], None]:
        state = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()}

        @torch.no_grad()
        def update(lr: float) -> None:
            for p, (mean, square) in state.items():
                mean.mul_(0.9).add_(p.grad, alpha=0.1)
                square.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                p.sub_(lr * mean / (square.sqrt() + 1e-8))
                p.mul_(1 - lr * 0.1)

        return update

    expected, _ = eager(5, make)
    model = started()
    late = optim.AdamConfig.DecayMode.AFTER_WEIGHT_UPDATE
    config = optim.AdamConfig(lr=0.1, lambda_coef=0.1, do_bias_correction=False, weight_decay_mode=late)
    tried = trainer(model, config, utils={"grad_norm_clip": False})
    for x, y in batches(5):
        tried.train_step(x, y)
    assert_same(model, expected)


class WithLoss(torch.nn.Module):
    """Returns its loss after its predictions, in a dict; its Function runs on either engine."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(
        self, x: torch.Tensor, *, target: torch.Tensor, scale: float = 2.0
    ) -> dict[str, torch.Tensor]:
        found = Square.apply(self.layer(x)) * scale
        return {"found": found, "loss": (found - target).square().mean()}


@pytest.fixture(scope="module")
def with_own_loss() -> tuple[ORTTrainer, torch.nn.Module]:
    torch.manual_seed(3)
    model = WithLoss()
    description = {
        "inputs": [("x", ["batch", 4]), ("target", ["batch", "classes"])],
        "outputs": [("found", ["batch", "classes"]), ("loss", [], True)],
    }
    return ORTTrainer(model, description, optim.SGDConfig(lr=0.1), options=options()), model


def test_a_model_returns_its_loss_itself_wherever_it_is_described(with_own_loss: Any) -> None:
    tried, model = with_own_loss
    x, target = torch.randn(2, 4), torch.randn(2, 3)
    expected = model(x, target=target)
    (weight,) = torch.autograd.grad(expected["loss"], [model.layer.weight])
    before = model.layer.weight.detach().clone()
    found = tried.train_step(x, target)
    torch.testing.assert_close(list(found), [expected["found"].detach(), expected["loss"].detach()])
    torch.testing.assert_close(model.layer.weight.detach(), before - 0.1 * weight)


@pytest.mark.parametrize(
    "call",
    [
        lambda step, x, y: step(x, y),
        lambda step, x, y: step([x, y]),
        lambda step, x, y: step(target=y, x=x),
        lambda step, x, y: step(x, target=y),
    ],
    ids=["by position", "as a list", "by name", "mixed"],
)
def test_inputs_are_given_by_position_or_by_name(with_own_loss: Any, call: Any) -> None:
    tried, model = with_own_loss
    x, y = torch.randn(2, 4), torch.randn(2, 3)
    torch.testing.assert_close(call(tried.eval_step, x, y)[1], model(x, target=y)["loss"].detach())


def test_sizes_that_the_description_names_vary(with_own_loss: Any) -> None:
    tried, model = with_own_loss
    for size in (1, 2, 5):
        x, y = torch.randn(size, 4), torch.randn(size, 3)
        torch.testing.assert_close(tried.eval_step(x, y)[0], model(x, target=y)["found"].detach())


@pytest.mark.parametrize("step", ["train_step", "eval_step"])
def test_fetches_name_the_outputs_that_a_step_returns(with_own_loss: Any, step: str) -> None:
    tried, _ = with_own_loss
    x, y = torch.randn(2, 4), torch.randn(2, 3)
    found = getattr(tried, step)(x, y, fetches=["loss", "found"])
    assert [list(value.shape) for value in found] == [[], [2, 3]]
    tried._train_step_info.fetches = ["loss"]
    try:
        alone = getattr(tried, step)(x, y)
    finally:
        tried._train_step_info.fetches = []
    assert (len(alone), alone.shape) == (1, torch.Size([]))


def test_a_single_output_serves_as_the_tensor_that_it_is(with_own_loss: Any) -> None:
    tried, _ = with_own_loss
    loss = tried.eval_step(torch.ones(2, 4), torch.ones(2, 3), fetches=["loss"])
    assert isinstance(loss, list)
    assert float(loss) == loss.item() == loss[0].item() == float(f"{loss:.20f}")
    assert torch.isfinite(loss)


def test_several_outputs_are_a_list_alone(with_own_loss: Any) -> None:
    tried, _ = with_own_loss
    found = tried.eval_step(torch.ones(2, 4), torch.ones(2, 3))
    with pytest.raises(
        AttributeError, match=r"^a step's 2 outputs are a list, which has no attribute 'item'$"
    ):
        found.item()


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (
            (torch.ones(2, 4),), {},
            "A step was given 1 inputs by position and [] by name; expected each of ['x', 'target'] once.",
        ),
        (
            (torch.ones(2, 4), torch.ones(2, 3)), {"x": torch.ones(2, 4)},
            "A step was given 2 inputs by position and ['x'] by name; expected each of ['x', 'target'] once.",
        ),
        (
            (torch.ones(2, 4), [1, 2]), {},
            "input 'target' is a list; expected a torch.Tensor.",
        ),
        (
            (torch.ones(2, 5), torch.ones(2, 3)), {},
            "input 'x' has shape [2, 5]; model_desc says ['batch', 4] with batch = 2.",
        ),
        (
            (torch.ones(2, 4), torch.ones(3, 3)), {},
            "input 'target' has shape [3, 3]; model_desc says ['batch', 'classes'] with batch = 2.",
        ),
        (
            (torch.ones(2, 4), torch.ones(2)), {},
            "input 'target' has shape [2]; model_desc says ['batch', 'classes'] with batch = 2.",
        ),
    ],
)  # fmt: skip
def test_inputs_that_are_not_as_described_are_refused(
    with_own_loss: Any, args: Any, kwargs: Any, message: str
) -> None:
    tried, model = with_own_loss
    before = model.layer.weight.detach().clone()
    with pytest.raises(SchemaMismatchError) as caught:
        tried.train_step(*args, **kwargs)
    assert str(caught.value) == message
    assert torch.equal(model.layer.weight, before)


def test_outputs_that_are_not_as_described_are_refused_before_an_update() -> None:
    model = started()
    description = {**DESCRIPTION, "outputs": [("loss", [], True), ("logits", ["batch", 2])]}
    tried = ORTTrainer(model, description, optim.SGDConfig(), cross_entropy, options())
    x, y = next(batches(1))
    with pytest.raises(SchemaMismatchError) as caught:
        tried.train_step(x, y)
    assert str(caught.value) == (
        "output 'logits' has shape [4, 3]; model_desc says ['batch', 2] with batch = 4."
    )
    assert torch.equal(model.last.weight, started().last.weight)


def test_fetches_that_name_no_output_are_refused(with_own_loss: Any) -> None:
    with pytest.raises(OptionError) as caught:
        with_own_loss[0].eval_step(torch.ones(2, 4), torch.ones(2, 3), fetches=["lost"])
    assert str(caught.value) == "fetches names 'lost', which is no output; allowed is one of found, loss."


class Dropping(Net):
    """Its dropout makes a difference between the modes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.nn.functional.dropout(x, 0.5, self.training))


def test_train_step_trains_and_eval_step_evaluates() -> None:
    torch.manual_seed(2)
    model = Dropping()
    tried = trainer(model)
    (x, y), *_ = batches(1)
    tried.train_step(x, y)
    assert model.training
    first, second = tried.eval_step(x, y), tried.eval_step(x, y)
    assert not model.training
    assert torch.equal(first[0], second[0])


class Overflow(torch.autograd.Function):
    """Puts an infinity into the gradient of rows that request it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(flag)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (flag,) = ctx.saved_tensors
        return grad + torch.where(flag > 0, float("inf"), 0.0), None


class Planted(Net):
    """Its gradients overflow where `flag` is above 0."""

    def forward(self, x: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
        return Overflow.apply(super().forward(x).float(), flag)


def test_a_step_whose_gradients_overflow_is_skipped_and_halves_the_scale() -> None:
    torch.manual_seed(5)
    model, scaler = Planted(), amp.DynamicLossScaler(loss_scale=8.0, up_scale_window=2)
    description = {
        "inputs": [("x", ["batch", 4]), ("flag", []), ("label", ["batch"])],
        "outputs": [("loss", [], True)],
    }
    tried = ORTTrainer(
        model, description, optim.SGDConfig(lr=0.1), cross_entropy,
        options(mixed_precision={"enabled": True, "loss_scaler": scaler}),
    )  # fmt: skip
    scales, finite, changed = [], [], []
    for (x, y), flag in zip(batches(4), (0.0, 1.0, 0.0, 0.0), strict=True):
        before = model.first.weight.detach().clone()
        tried.train_step(x, torch.tensor(flag), y)
        scales.append(scaler.loss_scale)
        finite.append(tried._train_step_info.all_finite)
        changed.append(not torch.equal(before, model.first.weight))
    assert scales == [8.0, 4.0, 4.0, 8.0]
    assert finite == changed == [True, False, True, True]
    assert tried._train_step_info.optimization_step == 3


def test_mixed_precision_is_eager_s_autocast() -> None:
    torch.manual_seed(5)
    model, expected = started(), started()
    tried = trainer(model, mixed_precision={"enabled": True, "loss_scaler": amp.LossScaler(128.0)})
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for x, y in batches(4):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = cross_entropy(expected(x), y)
        (loss * 128.0).backward()
        for parameter in expected.parameters():
            parameter.grad /= 128.0
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(tried.train_step(x, y)[0], loss.detach())
    assert_same(model, expected)


def test_mixed_precision_has_a_dynamic_scale_by_default_and_leaves_the_given_options_as_they_are() -> None:
    given = options(mixed_precision={"enabled": True})
    tried = ORTTrainer(started(), DESCRIPTION, optim.SGDConfig(), cross_entropy, given)
    scaler = tried.options.mixed_precision.loss_scaler
    assert (type(scaler), scaler.loss_scale) == (amp.DynamicLossScaler, 65536.0)
    assert given.mixed_precision.loss_scaler is None


class TwoHeads(Net):
    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.last(hidden), hidden


def test_a_loss_function_gets_all_that_the_model_returns():
    """A tuple is passed as it is, as only the model can choose a loss of one output alone."""

    def loss_fn(outputs, label):
        assert type(outputs) is tuple
        logits, hidden = outputs
        return cross_entropy(logits, label) + hidden.square().mean()

    torch.manual_seed(5)
    model = TwoHeads()
    twin, (x, label) = copy.deepcopy(model), next(batches(1))
    description = {
        "inputs": DESCRIPTION["inputs"],
        "outputs": [*DESCRIPTION["outputs"], ("hidden", ["batch", 6])],
    }
    made = ORTTrainer(model, description, optim.SGDConfig(lr=0.1), loss_fn, options())
    loss, logits, hidden = made.train_step(x, label)
    outputs = twin(x)
    expected = loss_fn(outputs, label)
    expected.backward()
    torch.testing.assert_close([loss, logits, hidden], [expected.detach(), *(o.detach() for o in outputs)])
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert_same(model, twin)
