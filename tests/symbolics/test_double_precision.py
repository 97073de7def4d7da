"""An exported graph in float64 has full precision, though attributes of ONNX operators are float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import torch2ort

_MEAN, _VARIANCE = torch.linspace(-1, 1, 6).double(), torch.logspace(-6, 1, 6).double()


class Computes(torch.nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


FUNCTIONS = {
    "layer_norm": lambda x: F.layer_norm(x, (5,)),
    "layer_norm of two dimensions": lambda x: F.layer_norm(x, (6, 5), x[0] + 1, x[1], eps=1e-3),
    "batch_norm": lambda x: F.batch_norm(x, _MEAN, _VARIANCE, _VARIANCE, _MEAN),
    "batch_norm in training": lambda x: F.batch_norm(x * 1e-3, None, None, training=True),
    "group_norm": lambda x: F.group_norm(x * 1e-3, 2),
    "instance_norm": lambda x: F.instance_norm(x * 1e-3),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.3),
    "elu": lambda x: F.elu(x, 0.3),
    "softplus": lambda x: F.softplus(x, 0.3),
    "hardsigmoid": F.hardsigmoid,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_export_has_the_digits_of_a_double(name: str) -> None:
    x = torch.randn(4, 6, 5, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    model = Computes(FUNCTIONS[name]).eval()
    torch.testing.assert_close(torch2ort.export(model, x)(x), model(x), rtol=1e-13, atol=1e-13)
