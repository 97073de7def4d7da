"""Models with Functions train on ONNX Runtime as in eager PyTorch."""

from __future__ import annotations

import pytest
import torch

from tests.support.comparison import assert_trains_like_eager
from tests.support.functions import Affine, Constants, Derived, Numpy, Square, TwoOutputs, scaled
from tests.support.sweeps import sample_cases


class Mlp(torch.nn.Module):
    """Three Functions: tensor and Parameter, constants of each kind, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.weight = torch.nn.Parameter(torch.rand(8) + 0.5)
        self.last = torch.nn.Linear(8, 3)

    def forward(self, x):
        hidden = Affine.apply(self.first(x), self.weight)
        hidden = Constants.apply(torch.tanh(hidden), *Constants.EXPECTED)
        doubled, summed = TwoOutputs.apply(hidden)
        return self.last(torch.tanh(doubled)) + summed


class Around(torch.nn.Module):
    """One linear layer on either side of a call."""

    def __init__(self, call) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.last = torch.nn.Linear(4, 2)
        self._call = call

    def forward(self, x):
        return self.last(self._call(self.first(x)))


OPTIMIZERS = pytest.mark.parametrize("optimizer", sample_cases([torch.optim.SGD, torch.optim.AdamW], 2))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_mlp_with_three_functions(optimizer):
    assert_trains_like_eager(Mlp(), [(torch.randn(5, 6, requires_grad=True),)], optimizer, lr=0.01)


@OPTIMIZERS
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(Numpy.apply, id="numpy body"),
        pytest.param(Derived.apply, id="subclass of a Function"),
        pytest.param(lambda h: torch.relu(h) + Square.apply(h), id="saved input beside an in-place operator"),
        pytest.param(lambda h: TwoOutputs.apply(h)[0], id="unused output"),
    ],
)
def test_a_function_between_layers(call, optimizer):
    assert_trains_like_eager(Around(call), [(torch.randn(5, 4, requires_grad=True),)], optimizer, lr=0.01)


@OPTIMIZERS
def test_two_functions_of_one_qualified_name_stay_two(optimizer):
    twice, thrice = scaled(2.0), scaled(3.0)
    module = assert_trains_like_eager(
        Around(lambda h: thrice.apply(torch.tanh(twice.apply(h)))),
        [(torch.randn(5, 4),)],
        optimizer,
        lr=0.001,
    )
    name = f"{twice.__module__}.{twice.__qualname__}"
    assert [site.func_name for site in module.exported.python_ops] == [name, f"{name}#2"]
    assert [site.function for site in module.exported.python_ops] == [twice, thrice]


def test_a_dynamic_batch_exports_twice_at_most():
    module = assert_trains_like_eager(
        Around(Square.apply), [(torch.randn(n, 4, requires_grad=True),) for n in (3, 5, 7)], lr=0.01
    )
    first = module.exported
    module(torch.randn(9, 4, requires_grad=True))
    assert module.exported is first
