"""Consecutive calls of a module, in any form, give eager PyTorch's results."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch2ort
from tests.support.comparison import assert_same
from tests.support.functions import Square


class Between(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -2.0]))

    def forward(self, x, y=None, *more, scale=2.0, extra=None, **others):
        h = Square.apply(x) * self.weight * scale
        for i, each in enumerate([y, *more, extra, *others.values()]):
            if each is not None:
                h = h - each * (i + 2)
        return h


def a(seed: int = 0) -> torch.Tensor:
    return torch.randn(3, 2, generator=torch.Generator().manual_seed(seed))


X, Y, Z = a(1), a(2), a(3)
CALLS = {
    "one": ((X,), {}),
    "two": ((X, Y), {}),
    "two the other way round": ((Y, X), {}),
    "one twice": ((X, X), {}),
    "by keyword": ((), {"x": X, "y": Y}),
    "by keyword, the other way round": ((), {"y": Y, "x": X}),
    "keywords that change places": ((), {"x": Y, "y": X}),
    "another keyword": ((X,), {"extra": Y}),
    "its neighbour": ((X,), {"y": Y}),
    "three": ((X, Y, Z), {}),
    "others": ((X,), {"p": Y, "q": Z}),
    "others, the other way round": ((X,), {"q": Z, "p": Y}),
    "a number": ((X, Y), {"scale": 3.0}),
    "another number": ((X, Y), {"scale": 4.0}),
    "another size": ((X[:2], Y[:2]), {}),
    "another layout": ((X.T.contiguous().T, Y), {}),
    "another type": ((X, Y.double()), {}),
}


@pytest.fixture(scope="module")
def module():
    return torch2ort.ORTModule(Between())


@pytest.mark.parametrize("first", CALLS)
def test_a_call_after_another(module, first):
    model = module.module
    for second in CALLS:
        for name in (first, second, second):
            args, kwargs = CALLS[name]
            with torch.no_grad():
                assert_same(module(*args, **kwargs), model(*args, **kwargs), name)


def test_a_default_that_is_written_to_between_calls():
    class Listing(nn.Module):
        def forward(self, x, seen=[]):  # noqa: B006 - what is tested
            for each in seen:
                x = x + each
            return Square.apply(x)

    model = Listing()
    module = torch2ort.ORTModule(model)
    module(X)
    assert_same(module(X), model(X), "output")
    Listing.forward.__defaults__[0].append(Y)
    assert_same(module(X), model(X), "output")
    assert_same(module(Z), model(Z), "output")


def test_a_forward_that_takes_its_arguments_in_another_order():
    model = Between()
    module = torch2ort.ORTModule(model)
    module(X, Y)
    module(X, Y)

    def turned(y, x):
        return Square.apply(x) - y

    model.forward = turned
    assert_same(module(X, Y), turned(X, Y), "output")
    assert_same(module(X, Y), turned(X, Y), "output")


def test_a_call_that_is_compared_with_eager_once():
    module = torch2ort.ORTModule(Between(), options=torch2ort.Options(verify=True))
    for args in ((X, Y), (Y, X), (Z, Y)):
        assert_same(module(*args), module.module(*args), "output")
