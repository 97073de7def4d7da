"""The formula of GELU written out becomes the operator; formulas that only resemble it do not."""

from __future__ import annotations

import pytest
import torch

import torch2ort
from tests.support.comparison import assert_trains_like_eager
from tests.support.functions import Square


class Written(torch.nn.Module):
    """``formula`` of a layer's result."""

    def __init__(self, formula):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.formula = formula

    def forward(self, x):
        return Square.apply(self.formula(self.layer(x)))


def inner(x, factor=0.7978845608028654, share=0.044715, power=3.0):
    return torch.tanh(factor * (x + share * torch.pow(x, power)))


GELU = {
    "half first": lambda x: 0.5 * x * (1.0 + inner(x)),
    "half last": lambda x: x * (1 + inner(x)) * 0.5,
    "sum first": lambda x: (inner(x) + 1) * (x * 0.5),
}
NO_GELU = {
    "another factor": lambda x: 0.5 * x * (1 + inner(x, factor=0.8)),
    "another share": lambda x: 0.5 * x * (1 + inner(x, share=0.0447)),
    "another power": lambda x: 0.5 * x * (1 + inner(x, power=2.0)),
    "another sum": lambda x: 0.5 * x * (2 + inner(x)),
    "another product": lambda x: 0.25 * x * (1 + inner(x)),
    "another tensor": lambda x: 0.5 * x.flip(0) * (1 + inner(x)),
    "sum used twice": lambda x: (lambda s: 0.5 * x * s + s)(1 + inner(x)),
}


def has_gelu(formula) -> bool:
    exported = torch2ort.export(Written(formula).eval(), torch.ones(2, 4), opset=20)
    return any("Gelu" in node.op_type for node in exported.proto.graph.node)


@pytest.mark.parametrize("formula", GELU.values(), ids=GELU.keys())
def test_gelu_is_recognised_in_any_order_of_its_factors(formula):
    assert has_gelu(formula)


@pytest.mark.parametrize("formula", NO_GELU.values(), ids=NO_GELU.keys())
def test_other_formulas_stay_as_they_are(formula):
    assert not has_gelu(formula)


@pytest.mark.parametrize("formula", [*GELU.values(), *NO_GELU.values()], ids=[*GELU.keys(), *NO_GELU.keys()])
def test_all_of_them_train_like_eager(formula):
    torch.manual_seed(0)
    assert_trains_like_eager(Written(formula), [(torch.randn(3, 4, requires_grad=True),)], steps=3)
