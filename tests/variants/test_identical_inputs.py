"""One tensor that a call passes twice: forward sees one object, and a graph accepts the same calls alone."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.autograd import Function

import torch2ort
from tests.support.comparison import assert_same
from torch2ort.graph.identical_inputs import as_passed, identical


class Asks(nn.Module):
    """Computes something else where it is given one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, y):
        return self.layer(x) * (2 if x is y else 3) + y


class Writes(Asks):
    """Writes to its first argument, and reads the second one afterwards."""

    def forward(self, x, y):
        x.add_(1)
        return self.layer(x) + y * 2


@pytest.fixture(params=[Asks, Writes])
def models(request):
    model = request.param()
    twin = request.param()
    twin.load_state_dict(model.state_dict())
    return torch2ort.ORTModule(model), twin


def values(*, requires_grad: bool = False) -> torch.Tensor:
    return (torch.arange(8.0).view(2, 4) / 8).requires_grad_(requires_grad)


@pytest.mark.parametrize("order", [(1, 2, 1, 2), (2, 1, 2, 2, 1)], ids=["one first", "two first"])
def test_calls_with_one_tensor_and_with_two_are_told_apart(models, order):
    for count in order:
        results = []
        for module in models:
            module.zero_grad()
            x, y = values(), values()
            result = module(x, y if count == 2 else x)
            result.square().sum().backward()
            results.append([result, x, y, *(p.grad for p in module.parameters())])
        assert_same(*results, f"a call with {count}")


def test_the_gradients_of_both_uses_go_to_the_one_tensor():
    model = Asks()
    wrapped = torch2ort.ORTModule(model)
    x, expected = values(requires_grad=True), values(requires_grad=True)
    wrapped(x, x).square().sum().backward()
    model(expected, expected).square().sum().backward()
    assert_same(x.grad, expected.grad, "the gradient")


def test_verify_compares_with_an_eager_call_of_one_tensor():
    x = values()
    model = Asks()
    wrapped = torch2ort.ORTModule(model, options=torch2ort.Options(verify=True))
    assert_same(wrapped(x, x), model(x, x), "the result")


def test_an_exported_call_with_one_tensor_refuses_two():
    wrapped, x = torch2ort.ORTModule(Asks()), values()
    expected = wrapped(x, x)
    assert_same(wrapped.exported(x, x), expected, "the exported model")
    expected_message = (
        "the call does not fit the exported model, in whose call 'y' is 'x', the same tensor. Pass one "
        "tensor again, or export a call with different ones"
    )
    with pytest.raises(torch2ort.SchemaMismatchError, match=re.escape(expected_message)):
        wrapped.exported(x, values())


def test_a_saved_call_with_one_tensor_refuses_two(tmp_path):
    wrapped, x = torch2ort.ORTModule(Asks()), values()
    expected = wrapped(x, x)
    wrapped.exported.save(tmp_path / "model.onnx")
    loaded = torch2ort.load(tmp_path / "model.onnx")
    assert_same(loaded(x, x), expected, "the loaded model")
    with pytest.raises(torch2ort.SchemaMismatchError, match="in whose call 'y' is 'x', the same tensor"):
        loaded(x, values())


def test_export_makes_an_input_of_each_argument_of_its_sample():
    model, x = Asks(), values()
    exported = torch2ort.export(model, (x, x))
    other = values() * 2
    assert_same(exported(x, other), model(x, other), "another second input")


class Same(Function):
    @staticmethod
    def forward(ctx, x, y):
        return x * 2 if x is y else x * 3

    @staticmethod
    def backward(ctx, grad):
        return grad, grad


class Added(Function):
    @staticmethod
    def forward(ctx, x, y):
        return x + (y if y is not None else 0)

    @staticmethod
    def backward(ctx, grad):
        return grad * 3, grad * 2


class Applies(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function, self.layer = function, nn.Linear(4, 4)

    def forward(self, x):
        h = self.layer(x)
        return self.function.apply(h, h)


def test_a_function_that_compares_one_tensor_given_twice_is_refused():
    expected = (
        f"{__name__}.Same: arguments 0 and 1 are the same tensor, for which a graph passes two, and its code "
        "compares objects by `is` or id(). Pass a clone() of one of them"
    )
    with pytest.raises(torch2ort.ExportError, match=re.escape(expected)):
        torch2ort.ORTModule(Applies(Same))(values())


def test_a_function_that_compares_with_none_takes_one_tensor_twice():
    model, x = Applies(Added), values()
    gradients = []
    for module in (torch2ort.ORTModule(model), model):
        model.zero_grad()
        module(x).square().sum().backward()
        gradients.append(model.layer.weight.grad.clone())
    assert_same(*gradients, "the gradient")


def test_positions_of_the_same_objects():
    a, b = object(), object()
    assert (identical([a, b]), identical([a, b, a, b])) == ((), (0, 1, 0, 1))


def test_tensors_as_they_were_passed():
    assert (as_passed(["a", "b", "c"], (0, 1, 0)), as_passed(["a", "b"], ())) == (["a", "b", "a"], ["a", "b"])
