"""Value checks of torch.distributions hold in every run of a graph, or it raises as eager PyTorch does."""

from __future__ import annotations

import re
from collections.abc import Callable

import onnxruntime
import pytest
import torch
from torch import nn

import torch2ort
from tests.support.comparison import assert_same, assert_trains_like_eager
from tests.support.sweeps import sample_cases

pytestmark = pytest.mark.usefixtures("checked_distributions")
distributions = torch.distributions
Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
LOG_PROBABILITIES: dict[str, Compute] = {
    "Beta": lambda h, x: distributions.Beta(h.exp(), h.exp()).log_prob(x.sigmoid()),
    "Categorical": lambda h, x: distributions.Categorical(logits=h).log_prob(x.argmax(-1)),
    "Categorical of probabilities": (
        lambda h, x: distributions.Categorical(h.softmax(-1)).log_prob(x.argmax(-1))
    ),
    "Dirichlet": lambda h, x: distributions.Dirichlet(h.exp()).log_prob(x.softmax(-1)),
    "MultivariateNormal": (
        lambda h, x: distributions.MultivariateNormal(h, scale_tril=torch.eye(4)).log_prob(x)
    ),
    "Normal": lambda h, x: distributions.Normal(h, h.exp()).log_prob(x),
    "TransformedDistribution": lambda h, x: distributions.TransformedDistribution(
        distributions.Normal(h, h.exp()), [distributions.TanhTransform()]
    ).log_prob(x.tanh()),
}


class Model(nn.Module):
    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.compute = compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(self.layer(x), x)


@pytest.mark.parametrize("name", sample_cases(LOG_PROBABILITIES, 2))
def test_a_distribution_with_its_checks_trains_like_eager(name: str) -> None:
    model = Model(LOG_PROBABILITIES[name])
    assert_trains_like_eager(model, [(torch.randn(n, 4),) for n in (3, 5)], steps=4, loss=lambda y: -y.mean())


@pytest.mark.parametrize("name", sample_cases(LOG_PROBABILITIES, 2, start=1))
def test_values_that_eager_refuses_are_refused(name: str) -> None:
    model = Model(LOG_PROBABILITIES[name])
    module = torch2ort.ORTModule(model)
    good, bad = torch.randn(3, 4), torch.full((3, 4), torch.nan)
    module(good)
    for refusing in (model, module):
        with pytest.raises(ValueError, match=r"^Expected (parameter|value argument) .* found invalid values"):
            refusing(bad)
    assert_same(module(good), model(good), "result after an error")


def test_a_check_of_constants_is_made_once() -> None:
    held = distributions.Normal(0.0, 1.0)
    model = Model(lambda h, x: h * held.log_prob(torch.tensor(0.5)))
    x = torch.randn(3, 4)
    assert_same(torch2ort.ORTModule(model)(x), model(x), "result")
    refused = Model(lambda h, x: h * held.log_prob(torch.tensor(torch.nan)))
    for refusing in (refused, torch2ort.ORTModule(refused)):
        with pytest.raises(ValueError, match=r"^Expected value argument .* found invalid values"):
            refusing(x)


def test_the_error_is_eagers_without_the_values() -> None:
    model = Model(lambda h, x: distributions.Normal(torch.zeros_like(h), x).log_prob(h))
    module = torch2ort.ORTModule(model)
    bad = -torch.ones(3, 4)
    with pytest.raises(ValueError, match="found invalid values") as eager:
        model(bad)
    with pytest.raises(ValueError, match="found invalid values") as ours:
        module(bad)
    assert str(ours.value) == str(eager.value).partition(":\n")[0]


def test_a_loaded_file_refuses_them_and_a_plain_session_computes(tmp_path) -> None:
    model, x = Model(LOG_PROBABILITIES["Normal"]).eval(), torch.randn(3, 4)
    torch2ort.export(model, x).save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    (found,) = session.run(None, {given.name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(x))
    with pytest.raises(ValueError, match=r"^Expected parameter loc"):
        torch2ort.load(tmp_path / "model.onnx")(torch.full((3, 4), torch.nan))


def test_a_check_that_python_makes_of_single_values_is_refused_with_a_way_out() -> None:
    model = Model(lambda h, x: distributions.Geometric(h.sigmoid()).log_prob((x > 0).float()))
    way_out = (
        "torch.distributions checks there that the values are allowed. Make the distribution with "
        "validate_args=False, or call torch.distributions.Distribution.set_default_validate_args(False)"
    )
    with pytest.raises(torch2ort.ExportError, match=f"{re.escape(way_out)}$"):
        torch2ort.ORTModule(model)(torch.randn(3, 4))
