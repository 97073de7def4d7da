"""Backward computes attention probabilities anew instead of keeping them, with the same gradients."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import torch2ort
from tests.support.comparison import assert_same, assert_trains_like_eager
from tests.support.optimized_graph import optimized_nodes

pytestmark = pytest.mark.ort_training("it is what is tried")


class Attention(torch.nn.Module):
    """Heads over one sequence; ``probabilities`` makes the weights of the values."""

    def __init__(self, probabilities, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.projection = torch.nn.Linear(width, 3 * width)
        self.bias = torch.nn.Parameter(torch.randn(1, heads, 1, 1))
        self.probabilities, self.heads = probabilities, heads

    def forward(self, x, mask):
        batch, length, width = x.shape
        parts = self.projection(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        weights = self.probabilities(self, query, key.transpose(-1, -2), mask)
        result = (weights[0] if isinstance(weights, tuple) else weights) @ value
        return (result, *weights[1:]) if isinstance(weights, tuple) else result


class Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 0.5

    @staticmethod
    def backward(ctx, grad):
        return grad * 0.5


def batches():
    return [(torch.randn(n, 5, 8), torch.rand(n, 1, 1, 5) > 0.3) for n in (3, 4)]


def softmaxes(model: torch.nn.Module, folder: Path) -> int:
    """How many the session's graph has in the end."""
    nodes = optimized_nodes(copy.deepcopy(model), folder, *batches()[0])
    return sum(node.op_type == "Softmax" for node in nodes)


TWICE = {
    "scaled": lambda m, q, k, mask: F.softmax(q @ k / 2.0, -1),
    "masked": lambda m, q, k, mask: F.softmax((q @ k).masked_fill(~mask, -1e9), -1),
    "capped": lambda m, q, k, mask: F.softmax(torch.tanh(q @ k / 4.0) * 4.0, -1),
    "dropped": lambda m, q, k, mask: F.dropout(F.softmax(q @ k, -1), 0.3, m.training),
    "both operands scaled": lambda m, q, k, mask: F.softmax((q * 0.7) @ (k * 0.7), -1),
    "positive": lambda m, q, k, mask: F.softmax(torch.relu(q) @ k, -1),
}

# What backward would have to read may change before it runs.
ONCE = {
    "added mask": lambda m, q, k, mask: F.softmax(q @ k + (mask.float() - 1) * 1e4, -1),
    "learned bias": lambda m, q, k, mask: F.softmax(q @ k + m.bias, -1),
    "returned": lambda m, q, k, mask: (p := F.softmax(q @ k, -1), p),
    "of a Function": lambda m, q, k, mask: F.softmax(Halve.apply(q @ k), -1),
    "of small values alone": lambda m, q, k, mask: F.softmax(q[..., :1] * k[..., :1, :], -1),
    "of a sum of products": lambda m, q, k, mask: F.softmax(q @ k + k.transpose(-1, -2) @ k, -1),
}


@pytest.mark.parametrize(
    ("probabilities", "times"),
    [*((p, 2) for p in TWICE.values()), *((p, 1) for p in ONCE.values())],
    ids=[*TWICE, *ONCE],
)
def test_attention_trains_like_eager(probabilities, times, tmp_path):
    model = Attention(probabilities)
    assert softmaxes(model, tmp_path) == times
    assert_trains_like_eager(model, batches(), steps=3)


def test_a_softmax_behind_a_layer_is_kept(tmp_path):
    class Gate(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 4)

        def forward(self, x, mask):
            return F.softmax(self.layer(x), -1)

    assert softmaxes(Gate(), tmp_path) == 1


def test_long_rows_are_kept(tmp_path):
    wide = Attention(TWICE["scaled"], width=1024, heads=2)
    nodes = optimized_nodes(wide, tmp_path, torch.randn(1, 3, 1024), torch.ones(1))
    assert sum(node.op_type == "Softmax" for node in nodes) == 1


def test_a_mask_may_change_before_backward():
    model = Attention(ONCE["added mask"])
    ort = torch2ort.ORTModule(copy.deepcopy(model))
    for module in (model, ort):
        x, mask = torch.ones(2, 5, 8), torch.ones(2, 1, 1, 5)
        loss = module(x, mask).sum()
        mask.zero_()
        loss.backward()
    assert_same(ort.projection.weight.grad, model.projection.weight.grad, "gradient")


def test_a_batch_of_nothing_trains_like_eager():
    model = Attention(TWICE["masked"])
    sizes = (2, 0, 3)
    given = [(torch.randn(n, 5, 8), torch.rand(n, 1, 1, 5) > 0.3) for n in sizes]
    assert_trains_like_eager(model, given, steps=3, loss=lambda y: y.square().sum())
