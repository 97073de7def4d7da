"""Gradients that users register apply to the operators in every engine."""

from __future__ import annotations

import copy

import pytest
import torch

import torch2ort
from tests.support.comparison import assert_same, assert_trains_like_eager


class Mapped(torch.autograd.Function):
    """Has an exporter for its forward, and a backward of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.nn.functional.elu(torch.nn.functional.celu(x, 0.5), 2.0)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        inner = torch.nn.functional.celu(x, 0.5)
        slope = torch.where(inner > 0, 1.0, 2 * inner.exp()) * torch.where(x > 0, 1.0, (x / 0.5).exp())
        return grad * slope


class Layer(torch.nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.function = function

    def forward(self, x):
        return self.function(self.layer(x)) * 2


def celu_gradient(g, inputs, outputs, grads, alpha=1.0):
    slope = g.op("Exp", g.op("Div", inputs[0], alpha))
    return g.op("Mul", grads[0], g.op("Where", g.op("Greater", inputs[0], 0), 1, slope))


def elu_gradient(g, inputs, outputs, grads, alpha=1.0):
    slope = g.op("Mul", g.op("Exp", inputs[0]), alpha)
    return g.op("Mul", grads[0], g.op("Where", g.op("Greater", inputs[0], 0), 1, slope))


def one_after_the_other(g, x):
    return g.op("Elu", g.op("Celu", x, alpha=0.5), alpha=2.0)


def gradients(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad for p in model.parameters()]


def test_a_gradient_goes_before_the_functions_own():
    torch2ort.register_exporter(Mapped, one_after_the_other)
    torch2ort.register_gradient("Celu", lambda g, inputs, outputs, grads, alpha: grads[0])
    torch2ort.register_gradient("Elu", lambda g, inputs, outputs, grads, alpha: g.op("Mul", grads[0], 3))
    model, x = Layer(Mapped.apply), torch.randn(3, 4)

    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            return Mapped.apply(h)

        @staticmethod
        def backward(ctx, grad):
            return grad * 3

    expected = Layer(Straight.apply)
    expected.load_state_dict(model.state_dict())
    assert_same(gradients(torch2ort.ORTModule(model), x), gradients(expected, x), "gradients")


def test_operators_one_after_the_other_train_like_eager():
    torch2ort.register_exporter(Mapped, one_after_the_other)
    torch2ort.register_gradient("Celu", celu_gradient)
    torch2ort.register_gradient("Elu", elu_gradient)
    module = assert_trains_like_eager(Layer(Mapped.apply), [(torch.randn(3, 4),)], steps=2)
    assert module.exported.python_ops == ()


def test_a_value_read_twice_gets_both_gradients():
    torch2ort.register_exporter(Mapped, one_after_the_other)
    torch2ort.register_gradient("Celu", celu_gradient)
    torch2ort.register_gradient("Elu", elu_gradient)
    model = Layer(lambda h: Mapped.apply(y := Mapped.apply(h)) + y)
    assert_trains_like_eager(model, [(torch.randn(3, 4, requires_grad=True),)], steps=2)


def test_an_operator_of_torch_has_the_gradient_of_its_translation():
    torch2ort.register_symbolic("aten::sinh", lambda g, x: g.op("Sinh", x))
    torch2ort.register_gradient("Sinh", lambda g, inputs, outputs, grads: g.op("Mul", grads[0], 5))
    model, x = Layer(torch.sinh), torch.randn(3, 4)
    wrapped = torch2ort.ORTModule(copy.deepcopy(model))
    found = gradients(wrapped, x)
    h = model.layer(x)
    expected = (8 * torch.sinh(h) * 5).detach()
    assert_same(found, [expected.t() @ x, expected.sum(0)], "gradients")


def test_other_operators_of_the_model_keep_their_gradients():
    torch2ort.register_gradient("Tanh", lambda g, inputs, outputs, grads: g.op("Mul", grads[0], 5))
    model, x = Layer(lambda h: torch.tanh(h.exp()).sin()), torch.randn(3, 4)

    class Fivefold(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            return torch.tanh(h)

        @staticmethod
        def backward(ctx, grad):
            return grad * 5

    expected = Layer(lambda h: Fivefold.apply(h.exp()).sin())
    expected.load_state_dict(model.state_dict())
    assert_same(gradients(torch2ort.ORTModule(model), x), gradients(expected, x), "gradients")


def test_a_call_with_other_operators_keeps_the_functions_own():
    torch2ort.register_exporter(
        Mapped, lambda g, x: g.op("Mul", g.op("Mul", one_after_the_other(g, x), 2), 0.5)
    )
    torch2ort.register_gradient("Celu", lambda g, inputs, outputs, grads, alpha: g.op("Mul", grads[0], 7))
    torch2ort.register_gradient("Elu", elu_gradient)
    assert_trains_like_eager(Layer(Mapped.apply), [(torch.randn(3, 4),)], steps=2)


class Scaled(torch.autograd.Function):
    """A product with a row, whose gradient is a sum."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class Row(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4))

    def forward(self, x):
        return Scaled.apply(x, self.weight).tanh()


@pytest.mark.parametrize("needed", [True, False], ids=["both arguments", "the second alone"])
def test_each_argument_has_its_gradient(needed):
    @torch2ort.register_gradient("Mul")
    def _(g, inputs, outputs, grads):
        row = g.op("ReduceSum", g.op("Mul", grads[0], inputs[0]), g.constant([0]), keepdims=0)
        return g.op("Mul", grads[0], inputs[1]), row

    torch2ort.register_exporter(Scaled, lambda g, x, weight: g.op("Mul", x, weight))
    x = torch.randn(3, 4, requires_grad=needed)
    assert_trains_like_eager(Row(), [(x,)], steps=2)


def test_a_call_with_other_operators_trains_like_eager():
    torch2ort.register_exporter(Mapped, lambda g, x: g.op("Mul", one_after_the_other(g, x), 1))
    torch2ort.register_gradient("Celu", celu_gradient)
    torch2ort.register_gradient("Elu", elu_gradient)
    assert_trains_like_eager(Layer(Mapped.apply), [(torch.randn(3, 4),)], steps=2)
