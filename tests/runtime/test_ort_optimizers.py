"""Graphs that ONNX Runtime's own optimizers would break."""

from __future__ import annotations

import torch

import torch2ort
from tests.support.comparison import assert_trains_like_eager

nn = torch.nn


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, c):
        ctx.save_for_backward(a, b, c)
        return a * b * c

    @staticmethod
    def backward(ctx, grad):
        a, b, c = ctx.saved_tensors
        return grad * b * c, grad * a * c, grad * a * b


class ThirdGradient(nn.Module):
    """The gradient of ``h`` is a sum of two; one is a product with the third output of a node."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x, a, b):
        h = self.first(x).tanh()
        return Product.apply(a, b, self.second(h)).sum() + h.exp().sum()


class AddProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, c):
        return a @ b + c


class ThirdPart(nn.Module):
    def forward(self, x, weight, bias):
        return AddProduct.apply(x.split(4, -1)[2], weight, bias)


def test_a_gradient_that_adds_a_product_with_the_third_output_of_a_node():
    a, b = torch.rand(5, 3, requires_grad=True), torch.rand(5, 3, requires_grad=True)
    assert_trains_like_eager(ThirdGradient(), [(torch.randn(5, 4), a, b)], steps=2)


def test_a_sum_with_a_product_of_the_third_output_of_a_node():
    torch2ort.register_exporter(AddProduct)(lambda g, a, b, c: g.op("Sum", g.op("Gemm", a, b), c))
    try:
        inputs = torch.randn(5, 12), torch.randn(4, 3), torch.randn(5, 3)
        actual = torch2ort.export(ThirdPart(), inputs)(*inputs)
    finally:
        torch2ort.unregister(AddProduct)
    torch.testing.assert_close(actual, ThirdPart()(*inputs))
