"""A copy fills its destination, whatever the shape and dtype of its source."""

from __future__ import annotations

import pytest
import torch

import torch2ort


class Writing(torch.nn.Module):
    """``write`` gets a tensor of the model's own and its input."""

    def __init__(self, write) -> None:
        super().__init__()
        self._write = write

    def forward(self, x):
        own = x * 2
        self._write(own, x)
        return own


def a_row(own, x):
    own.copy_(x[0])


def a_column(own, x):
    own.copy_(x[:, :1])


def one_number(own, x):
    own.copy_(x[1, 2])


def a_row_to_a_part(own, x):
    own[:, 1:3] = x[:1, :2]


def integers(own, x):
    own.copy_(torch.arange(3).unsqueeze(1))


COPIES = [a_row, a_column, one_number, a_row_to_a_part, integers]


@pytest.mark.parametrize("write", COPIES, ids=lambda write: write.__name__)
def test_a_copy_is_spread_over_the_tensor_without_a_gradient(write):
    torch.manual_seed(0)
    model, x = Writing(write), torch.randn(3, 4)
    torch.testing.assert_close(torch2ort.ORTModule(model)(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("write", COPIES, ids=lambda write: write.__name__)
def test_a_copy_is_spread_over_the_tensor_in_a_file(write):
    torch.manual_seed(0)
    model, x = Writing(write), torch.randn(3, 4)
    torch.testing.assert_close(torch2ort.export(model, (x,))(x), model(x), rtol=0, atol=0)
