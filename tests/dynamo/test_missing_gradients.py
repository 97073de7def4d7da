"""Outputs that no loss depends on: their gradients are missing in eager PyTorch, not zeros."""

from __future__ import annotations

import pytest
import torch

from tests.support.comparison import assert_same


def assert_gradients_like_eager(function, chosen, *arguments) -> None:
    found = []
    for one in (function, torch.compile(function, backend="torch2ort", fullgraph=True)):
        inputs = [a.detach().clone().requires_grad_() for a in arguments]
        outputs = one(*inputs)
        outputs[chosen].sum().backward()
        found.append([i.grad for i in inputs])
    assert_same(found[1], found[0], "gradients")


@pytest.fixture(autouse=True)
def _afresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("chosen", [0, 1])
def test_an_infinite_derivative_of_another_output_is_none_of_its_business(chosen) -> None:
    # The square root's derivative at zero is infinite, and zero times infinity is NaN.
    assert_gradients_like_eager(lambda x, y: (x * 2, x.sqrt() + y), chosen, torch.zeros(3), torch.ones(3))


def test_sizes_that_vary_are_known_without_the_gradients_that_told_them() -> None:
    function = torch.compile(
        lambda x, y: ((y * x.sum()).t(), x * x.shape[0]), backend="torch2ort", dynamic=True
    )
    for size in (3, 5):
        x, y = torch.randn(size, requires_grad=True), torch.randn(2, size, requires_grad=True)
        function(x, y)[1].sum().backward()
        assert_same((x.grad, y.grad), (torch.full((size,), float(size)), None), "gradients")


@pytest.mark.parametrize("chosen", [0, 1])
def test_sizes_that_only_numbers_tell_are_known_without_a_gradient(chosen: int) -> None:
    def function(x, y):
        return (2 * y).expand(x.shape[0], 3).sum(0).exp(), y.exp().unsqueeze(0).repeat(x.shape[0] + 1, 1)

    faster = torch.compile(function, backend="torch2ort", dynamic=True)
    for size in (4, 6):
        found = []
        for one in (function, faster):
            y = torch.tensor([0.1, -0.2, 0.3], requires_grad=True)
            one(torch.zeros(size), y)[chosen].sum().backward()
            found.append(y.grad)
        assert_same(found[1], found[0], "gradient")


def test_a_call_of_a_kernel_whose_result_no_loss_reads_has_no_backward() -> None:
    assert_gradients_like_eager(lambda x, y: (x.exp(), y.prod()), 0, torch.randn(2), torch.randn(3))
