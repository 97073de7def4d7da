"""Values that eager PyTorch refuses are refused, even if the operator's result is unused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import torch2ort
from tests.ops.indices import outcome


def shape_alone(x, k):
    return torch.zeros_like(F.embedding(k, x)).sum()


def in_place(x, k):
    x.clone()[k] = 1.0


def through_a_view(x, k):
    x.clone()[:, :3].index_fill_(0, k, 1.0)


def without_gradient(x, k):
    with torch.no_grad():
        F.embedding(k, x)


# Calls whose results are unused, each with an index that it refuses.
OF_INDICES = {
    "embedding": (lambda x, k: F.embedding(k, x), 9),
    "embedding, its sum": (lambda x, k: F.embedding(k, x).sum(), 9),
    "embedding, its shape": (shape_alone, 9),
    "embedding, no gradient": (without_gradient, 9),
    "loss": (lambda x, k: F.nll_loss(x.log_softmax(1), k), 4),
    "gather": (lambda x, k: x.gather(1, k[:, None]), 4),
    "one_hot": (lambda x, k: F.one_hot(k, 4), 4),
    "write": (in_place, 3),
    "write to a view": (through_a_view, 3),
    "floor_divide": (lambda x, k: torch.arange(3) // k, 0),
    "remainder": (lambda x, k: torch.arange(3) % k, 0),
}
OF_NUMBERS = {
    "inverse": (lambda x, _: torch.linalg.inv(x[:, :3] * torch.eye(3)), 0.0),
    "cholesky": (lambda x, _: torch.linalg.cholesky(x[:, :3] * torch.eye(3)), -1.0),
    "binary_cross_entropy": (lambda x, _: F.binary_cross_entropy(x, x * 0), 2.0),
}


class Unread(torch.nn.Module):
    """Makes all of these calls, each with its own indices, and uses none of the results."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((), 0.5))

    def forward(self, tensors, indices):
        for name, call in CALLS.items():
            call(tensors[name] * self.scale * 2, indices[name])
        return sum(tensors.values()) * self.scale


CALLS = {name: call for name, (call, _) in {**OF_INDICES, **OF_NUMBERS}.items()}


def inputs(refused=""):
    tensors = {name: torch.ones(3, 4) for name in CALLS}
    indices = {name: torch.tensor([1, 1, 2]) for name in CALLS}
    if refused in OF_INDICES:
        indices[refused][1] = OF_INDICES[refused][1]
    elif refused:
        tensors[refused] *= OF_NUMBERS[refused][1]
    return tensors, indices


@pytest.fixture(scope="module")
def models():
    wrapped = torch2ort.ORTModule(Unread())
    exported = torch2ort.export(Unread().eval(), inputs())
    return {"training": wrapped.train, "evaluation": wrapped.eval, "an export": lambda: exported}


@pytest.mark.parametrize("mode", ["training", "evaluation", "an export"])
@pytest.mark.parametrize("name", CALLS)
def test_what_eager_refuses_is_refused_though_nobody_reads_the_result(models, name, mode):
    expected = outcome(Unread(), *inputs(name))
    assert expected[0] is not torch.Tensor
    given = models[mode]()
    assert outcome(given, *inputs(name)) == expected
    torch.testing.assert_close(given(*inputs()), Unread()(*inputs()))


def test_the_gradients_beside_them_are_eagers(models):
    found = []
    for model in (Unread(), models["training"]()):
        model(*inputs()).sum().backward()
        found.append(next(model.parameters()).grad)
    torch.testing.assert_close(*found)


class BesideARegion(torch.nn.Module):
    """Leaves the result of an index unused, and then computes a value without gradient."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((), 0.5))

    def forward(self, x, k):
        scaled = x * self.scale
        scaled[torch.arange(3), k]
        with torch.no_grad():
            x.roll(1, 1)
        return scaled


def test_an_index_beside_a_region_without_gradient_is_checked():
    x, module = torch.ones(3, 4), torch2ort.ORTModule(BesideARegion())
    module(x, torch.tensor([1, 3, 0])).sum().backward()
    torch.testing.assert_close(next(module.parameters()).grad, x.sum())
    outside = torch.tensor([1, 4, 0])
    assert outcome(module, x, outside) == outcome(BesideARegion(), x, outside)


class Counted(torch.nn.Module):
    def forward(self, k):
        torch.bincount(k, minlength=9)
        return torch.bincount(k, minlength=5)[:5]


def test_what_is_counted_is_refused_below_zero():
    exported = torch2ort.export(Counted(), torch.tensor([1, 2]))
    for numbers in ([1, 4], [0, -1], [-7, 1]):
        k = torch.tensor(numbers)
        expected, found = outcome(Counted(), k), outcome(exported, k)
        assert torch.equal(found, expected) if isinstance(found, torch.Tensor) else found == expected


class Probabilities(torch.nn.Module):
    def forward(self, x):
        return F.binary_cross_entropy(x, x * 0)


def test_an_export_of_a_loss_refuses_what_is_no_probability():
    x = torch.tensor([0.2, 0.4])
    exported = torch2ort.export(Probabilities(), x)
    torch.testing.assert_close(exported(x), Probabilities()(x))
    assert outcome(exported, x * 4) == outcome(Probabilities(), x * 4)
