"""The optimizers of a plain session keep each call of a Function: none is merged, folded or dropped."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import Function

import torch2ort
from tests.stock.models import plain_session, registered, run


class Noise(Function):
    @staticmethod
    def forward(ctx, x):
        return x + torch.randn_like(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Model(torch.nn.Module):
    """Equal calls on an input and on a constant, and one whose result is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("constant", torch.ones(4))

    def forward(self, x):
        difference = Noise.apply(x) - Noise.apply(x)
        Noise.apply(x)
        fixed = Noise.apply(self.constant) - Noise.apply(self.constant)
        return difference + fixed, Noise.apply(torch.zeros(4))


@pytest.mark.parametrize("plain", [True, False])
def test_equal_calls_are_several(plain, tmp_path):
    model, x = Model().eval(), torch.randn(3, 4)
    exported = torch2ort.export(model, x)
    exported.save(tmp_path / "model.onnx")
    with registered(Noise):
        session = plain_session(str(tmp_path / "model.onnx")) if plain else None
    for _ in range(2):
        torch.manual_seed(3)
        expected = *model(x), torch.rand(1)
        torch.manual_seed(3)
        actual = *(run(session, x) if plain else exported(x)), torch.rand(1)
        torch.testing.assert_close(actual, expected)
