"""Indexing by a one-element tensor gives eager PyTorch's result, or its error for an index out of range."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torch2ort
from tests.ops.indices import outcome

pytestmark = pytest.mark.skipif(
    torch.__version__.startswith(("2.11.", "2.12.")),
    reason="torch.export takes no such index, which is refused with the line that has it",
)
BODIES = {
    "a row": lambda h, i: h[i],
    "a column": lambda h, i: h[:, i],
    "a part of a row": lambda h, i: h[i, 1:] * 2,
    "a number": lambda h, i: h[i, i],
    "from the end": lambda h, i: h[-i - 1] * 1,
    "by another type": lambda h, i: h[i.int()],
    "by a number": lambda h, i: h[i.item()] * 1,
    "by what is computed": lambda h, i: h[(h.detach().sum(1).argmax() + i) % 3],
    "beside its source": lambda h, i: h[i].sum() + h,
}


class Model(nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.body = body

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return self.body(self.layer(x), i)


def gradients(module, *given):
    module.zero_grad()
    module(*given).square().sum().backward()
    return [parameter.grad.clone() for parameter in module.parameters()]


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_values_and_gradients_are_eagers(body):
    model = Model(body)
    module, x = torch2ort.ORTModule(copy.deepcopy(model)), torch.randn(3, 4)
    for number in (1, 2, -1, 0):
        given = x, torch.tensor(number)
        torch.testing.assert_close(module(*given), model(*given))
        torch.testing.assert_close(gradients(module, *given), gradients(model, *given))


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("number", [3, -4])
def test_what_lies_outside_raises_eagers_error(number, is_training):
    model = Model(BODIES["a row"]).train(is_training)
    module, x = torch2ort.ORTModule(copy.deepcopy(model)), torch.randn(3, 4)
    module(x, torch.tensor(1))
    expected = outcome(model, x, torch.tensor(number))
    assert expected[0] is IndexError
    assert outcome(module, x, torch.tensor(number)) == expected


def test_what_nobody_reads_raises_eagers_error():
    def body(h, i):
        h[i]
        return h * 2

    module, x = torch2ort.ORTModule(Model(body)), torch.randn(3, 4)
    module(x, torch.tensor(1))
    with pytest.raises(IndexError, match=r"^index 7 is out of bounds for dimension 0 with size 3$"):
        module(x, torch.tensor(7))
