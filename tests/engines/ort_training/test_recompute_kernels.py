"""Backward computes what a cheap kernel returned anew instead of keeping it, with the same gradients."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch2ort
from tests.support.between import WIDTH, Between, Keep
from tests.support.comparison import assert_same, assert_trains_like_eager
from tests.support.optimized_graph import optimized_nodes

pytestmark = pytest.mark.ort_training("it is what is tried")

REPEATED = {"FastGelu", "Gelu", "LayerNormalization", "QuickGelu"}
# From here on PyTorch's kernels do such operators (see torch2ort.engines.ort_training.kernel_choice).
LENGTH = 16
X = torch.randn(8, LENGTH, 6)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def repeated(model: nn.Module, folder: Path, x: torch.Tensor) -> list[str]:
    """The operators that compute a kernel's result again in the session's graph."""
    nodes = optimized_nodes(copy.deepcopy(model), folder, x)
    return [n.op_type for n in nodes if "/again/" in n.output[0] and n.op_type in REPEATED]


def batches():
    return [(torch.randn(n, LENGTH, 6),) for n in (8, 9)]


def norm(**settings):
    made = nn.LayerNorm(WIDTH, **settings)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


def gelu_and_its_product(m, h):
    gate = F.gelu(h)
    return m.after(gate * h + gate)


AGAIN = {
    "gelu": (Between(lambda m, h: m.after(F.gelu(h))), ["Gelu"]),
    "gelu by tanh": (Between(lambda m, h: m.after(F.gelu(h, approximate="tanh"))), ["FastGelu"]),
    "silu": (Between(lambda m, h: m.after(F.silu(h))), ["QuickGelu"]),
    "layer norm": (Between(lambda m, h: m.after(m.norm(h)), norm()), ["LayerNormalization"]),
    "layer norm without bias": (
        Between(lambda m, h: m.after(m.norm(h)), norm(bias=False, eps=1)),
        ["LayerNormalization"],
    ),
    "layer norm over two dimensions": (
        Between(lambda m, h: m.after(m.norm(h)), nn.LayerNorm((LENGTH, WIDTH), eps=0.1)),
        ["LayerNormalization"],
    ),
    "frozen layer norm": (
        Between(lambda m, h: m.after(m.norm(h)), norm().requires_grad_(False)),
        ["LayerNormalization"],
    ),
    "another shape of it": (Between(lambda m, h: m.after(F.gelu(h).flatten(0, 1))), ["Gelu"]),
    "it and another shape of it": (
        Between(lambda m, h: m.after(g := F.gelu(h)) + m.after(g.flatten(0, 1)).view(-1, LENGTH, 5)),
        ["Gelu"],
    ),
    "two readers of which one waits for the other": (Between(gelu_and_its_product), ["Gelu"]),
    "a gate": (Between(lambda m, h: m.after(F.silu(h) * torch.tanh(h))), ["QuickGelu"]),
    "one behind the other": (
        Between(lambda m, h: m.after(F.gelu(m.after(m.norm(h)) @ m.after.weight)), norm()),
        ["LayerNormalization", "Gelu"],
    ),
    "in front of a Function that keeps nothing": (
        Between(lambda m, h: m.after(g := F.gelu(h)) + Double.apply(g)[..., :5]),
        ["Gelu"],
    ),
}

# Somebody keeps the result anyway, or nobody keeps what it is computed from.
KEPT = {
    "returned": Between(lambda m, h: (m.after(g := F.gelu(h)), g)),
    "another shape returned": Between(lambda m, h: (m.after(g := F.gelu(h)), g.flatten(0, 1))),
    "of a Function": Between(lambda m, h: m.after(g := F.gelu(h)) + Keep.apply(g)[..., :5]),
    "in front of another kernel alone": Between(lambda m, h: m.norm(F.gelu(h)), nn.LayerNorm(WIDTH)),
    "normalisation without a weight": Between(lambda m, h: m.after(F.layer_norm(h, (WIDTH,)))),
    "nothing reads it": Between(lambda m, h: F.gelu(h).sum(-1)),
    "relu, which keeps its result": Between(lambda m, h: m.after(F.relu(h))),
    "nothing before it is trained": Between(lambda m, h: m.after(F.gelu(h.detach()))),
}


@pytest.mark.parametrize(("model", "operators"), AGAIN.values(), ids=AGAIN)
def test_a_cheap_result_is_computed_again(model, operators, tmp_path):
    assert sorted(repeated(model, tmp_path, X)) == sorted(operators)


@pytest.mark.parametrize("model", KEPT.values(), ids=KEPT)
def test_a_result_that_saves_nothing_is_computed_once(model, tmp_path):
    assert repeated(model, tmp_path, X) == []


@pytest.mark.parametrize("model", [*(m for m, _ in AGAIN.values()), *KEPT.values()], ids=[*AGAIN, *KEPT])
def test_a_model_with_cheap_kernels_trains_like_eager(model):
    assert_trains_like_eager(copy.deepcopy(model), batches(), steps=3)


@pytest.mark.parametrize("kind", ["gelu", "layer norm", "silu"])
def test_a_batch_of_nothing_trains_like_eager(kind):
    given = [(torch.randn(n, LENGTH, 6),) for n in (8, 0, 9)]
    model = copy.deepcopy(AGAIN[kind][0])
    assert_trains_like_eager(model, given, steps=3, loss=lambda y: 1e-4 * y.square().sum())


def test_doubles_are_computed_once(tmp_path):
    model = copy.deepcopy(AGAIN["gelu"][0]).double()
    assert repeated(model, tmp_path, X.double()) == []


def test_a_weight_that_changed_before_backward_is_eagers_error():
    model = AGAIN["layer norm"][0]
    ort = torch2ort.ORTModule(copy.deepcopy(model))
    loss = ort(X).sum()
    with torch.no_grad():
        ort.norm.bias.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_input_that_requires_a_gradient_gets_eagers():
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 4)

        def forward(self, x):
            return self.layer(F.gelu(x))

    model = First()
    ort = torch2ort.ORTModule(copy.deepcopy(model))
    found = []
    for module in (model, ort):
        x = torch.linspace(-3, 3, 128 * WIDTH).view(128, WIDTH).requires_grad_()
        module(x).square().sum().backward()
        found.append(x.grad)
    assert_same(found[1], found[0], "gradient")
