"""A matrix product over no elements is zero: the gradient of an empty batch, a layer without inputs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torch2ort
from tests.support.sweeps import sample_cases


class Twice(nn.Module):
    """A weight whose gradient is a sum of two products over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x).tanh())


class Blend(nn.Module):
    """A bias and a product of two inputs, with factors (addmm)."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.t(), y, beta=0.5, alpha=2).tanh()


def steps(module, batches):
    """Outputs and gradients of a step on each batch."""
    found = []
    for batch in batches:
        module.zero_grad()
        inputs = [x.clone().requires_grad_() for x in batch]
        output = module(*inputs)
        output.square().sum().backward()
        found += [output.detach(), *(x.grad for x in inputs), *(p.grad.clone() for p in module.parameters())]
    return found


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("make", "batches"),
    [
        pytest.param(Twice, [[torch.randn(0, 4)]], id="an empty batch"),
        pytest.param(Twice, [[torch.randn(n, 4)] for n in (3, 0, 2)], id="an empty batch between others"),
        pytest.param(lambda: nn.Linear(0, 4), [[torch.randn(3, 0)]], id="a layer without inputs"),
        pytest.param(Blend, [[torch.randn(n, 2), torch.randn(n, 3)] for n in (3, 0)], id="addmm"),
    ],
)
def test_products_over_nothing_are_zeros(make, batches):
    model = make()
    module = torch2ort.ORTModule(copy.deepcopy(model))
    torch.testing.assert_close(steps(module, batches), steps(model, batches))


class Product(nn.Module):
    """A product behind other values, whose memory it may reuse."""

    def __init__(self, call) -> None:
        super().__init__()
        self._call = call

    def forward(self, *operands: torch.Tensor) -> torch.Tensor:
        product = self._call(*(x.neg() for x in operands))
        return product + (torch.full_like(product, 7).exp().neg() * 0)


# A product, and its operands' sizes; ``n`` is the size of the dimension that is summed over.
PRODUCTS = {
    "matrices": (torch.matmul, lambda n: [(5, n), (n, 6)]),
    "a matrix and a vector": (torch.matmul, lambda n: [(5, n), (n,)]),
    "a vector and a matrix": (torch.matmul, lambda n: [(n,), (n, 6)]),
    "a vector and matrices": (torch.matmul, lambda n: [(n,), (4, n, 6)]),
    "matrices and a vector": (torch.matmul, lambda n: [(4, 5, n), (n,)]),
    "vectors": (torch.matmul, lambda n: [(n,), (n,)]),
    "several matrices": (torch.bmm, lambda n: [(4, 5, n), (4, n, 6)]),
    "einsum": (lambda x, y: torch.einsum("bik,bjk->bij", x, y), lambda n: [(4, 5, n), (4, 6, n)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize(("call", "sizes"), sample_cases(PRODUCTS.values(), 2), ids=PRODUCTS)
def test_an_exported_product_over_nothing_is_zeros(call, sizes, dtype):
    model = Product(call)
    for n in (3, 0):
        operands = tuple(torch.ones(size, dtype=dtype) for size in sizes(n))
        exported = torch2ort.export(model, operands)
        for _ in range(3):
            torch.testing.assert_close(exported(*operands), model(*operands))


def test_sizes_that_values_decide_may_be_zero():
    class Chosen(nn.Module):
        def forward(self, x):
            chosen = x[x > 0]
            return chosen[None] @ torch.outer(chosen, x)

    model = Chosen()
    exported = torch2ort.export(model, (torch.randn(6),))
    for x in (torch.randn(6), -torch.ones(6)):
        torch.testing.assert_close(exported(x), model(x))


ADDED = {
    "addmm": (torch.addmm, lambda n: [(5, 6), (5, n), (n, 6)]),
    "addmv": (torch.addmv, lambda n: [(5,), (5, n), (n,)]),
    "addbmm": (torch.addbmm, lambda n: [(5, 6), (4, 5, n), (4, n, 6)]),
    "baddbmm": (torch.baddbmm, lambda n: [(4, 5, 6), (4, 5, n), (4, n, 6)]),
    "addr": (torch.addr, lambda n: [(5, 6), (5,), (6,)]),
}


@pytest.mark.parametrize("weights", [(0, 1), (0, 2), (0.5, 2)], ids=str)
@pytest.mark.parametrize(("call", "sizes"), sample_cases(ADDED.values(), 2, start=1), ids=ADDED)
def test_what_is_added_is_weighed_and_unread_at_zero(call, sizes, weights):
    beta, alpha = weights
    model = Product(lambda *operands: call(*operands, beta=beta, alpha=alpha))
    module = torch2ort.ORTModule(copy.deepcopy(model))
    for n in (3, 0):
        added, *operands = (torch.rand(size) for size in sizes(n))
        if beta == 0:
            added.fill_(torch.nan)
        batches = [[added, *operands]]
        torch.testing.assert_close(steps(module, batches), steps(model, batches))


def test_an_inference_takes_them():
    model = Blend().eval()
    module = torch2ort.ORTModule(copy.deepcopy(model))
    with torch.no_grad():
        for n in (3, 0):
            x, y = torch.randn(n, 2), torch.randn(n, 3)
            torch.testing.assert_close(module(x, y), model(x, y))
