"""Operators whose training was wrong, or refused, for some of their arguments."""

from __future__ import annotations

import pytest
import torch

import torch2ort
from tests.support.unary_op_model import Applied, Operator

# Functions of x, a tensor of shape (2, 3).
CASES: dict[str, Operator] = {
    "var, divided by less than nothing": lambda x: x.var(0, correction=3),
    "var, divided by nothing": lambda x: x.var(1, correction=3),
    "var_mean, divided by less than nothing": lambda x: torch.var_mean(x, 0, correction=2.5)[0],
    "var of nothing": lambda x: x[:0].var(),
    "linspace between tensors": lambda x: torch.linspace(x[0, 0], x[1, 2], 4) * x[0, 0],
    "linspace from a tensor": lambda x: torch.linspace(x[0, 0], 7, 4) * x[0, 0],
    "reshape of nothing, beside a kernel": lambda x: torch.special.erfcx(x)[:, :0].reshape(0, 0) * 2,
    "view of nothing, beside a kernel": lambda x: torch.special.erfcx(x)[:0].view(5, 2, 0, 3) * 2,
    "logspace to a tensor": lambda x: torch.logspace(0, x[0, 0], 4) * x[0, 0],
}


@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")
@pytest.mark.parametrize("name", CASES)
def test_an_operator_trains_as_in_eager(name: str) -> None:
    ways = []
    model = Applied({name: CASES[name]})
    for module in (torch2ort.ORTModule(model), model):
        x = torch.linspace(0.2, 1.9, 6).reshape(2, 3).requires_grad_()
        result = module(x)[name]
        result.backward(torch.linspace(0.3, 1.1, result.numel()).reshape(result.shape))
        ways.append((result.detach(), x.grad))
    torch.testing.assert_close(*ways, equal_nan=True)
