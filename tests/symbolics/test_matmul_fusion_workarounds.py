"""Matrix products equal eager PyTorch's even where onnxruntime fuses a transposition or factors into them."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import pytest
import torch
import torch.nn.functional as F

import torch2ort
from tests.support.comparison import assert_same

CASES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mv": lambda a, v: torch.mv(a.t(), v),
    "matmul": lambda a, v: a.T @ v,
    "scaled": lambda a, v: 2 * (a.T @ v),
    "of a scaled matrix": lambda a, v: (2 * a).T @ v,
    "batched": lambda a, v: torch.stack([a, a + 1]).mT @ v,
    "einsum": lambda a, v: torch.einsum("ij,i->j", a, v),
    "addmv": lambda a, v: torch.addmv(torch.ones(3), a.t(), v),
    "not transposed": lambda a, v: a @ v[:3],
    "vector on the left": lambda a, v: v[:3] @ a.T,
    "two vectors": lambda a, v: a[:, 0] @ v,
}


def attention(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x)


# Consecutive factors, the first of which has another consumer.
FACTORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "attention": lambda a, v: attention(a[None] * 2),
    "attention, twice scaled": lambda a, v: attention(a[None] / 3 * 2),
    "one side": lambda a, v: (h := a * 2, (h * 0.5) @ h.T @ h)[1],
    "divided": lambda a, v: (h := a / 2, (h / 0.5) @ h.T @ h)[1],
    "divided by it": lambda a, v: (h := 2 / (a + 9), (h * 0.5) @ h.T @ h)[1],
    "an output, too": lambda a, v: torch.cat([h := a * 2, (h * 0.5) @ h.T @ h]),
}


class Product(torch.nn.Module):
    def __init__(self, call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._call = call

    def forward(self, a: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._call(a, v)


@pytest.mark.parametrize("call", [*CASES.values(), *FACTORS.values()], ids=[*CASES, *FACTORS])
def test_an_exported_product_is_eagers(call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    a, v = torch.randn(5, 3), torch.randn(5)
    exported = torch2ort.export(Product(call), (a, v))
    assert_same(exported(a, v), call(a, v), "the product")
    onnx.checker.check_model(exported.proto, full_check=True)


@pytest.mark.parametrize("training", [False, True])
def test_spectral_norm_without_gradients_is_eagers(training: bool) -> None:
    layer = torch.nn.utils.spectral_norm(torch.nn.Linear(4, 6)).train(training)
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    x = torch.randn(3, 4)
    with torch.no_grad():
        expected = layer(x), {name: value.clone() for name, value in layer.state_dict().items()}
        layer.load_state_dict(state)
        found = torch2ort.ORTModule(layer)(x)
    assert_same(found, expected[0], "the result")
    assert_same(dict(layer.state_dict()), expected[1], "the state")
