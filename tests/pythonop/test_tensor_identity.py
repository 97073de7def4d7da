"""Identity of tensors: results of a Function are the same objects, or distinct, as in eager PyTorch."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch.autograd import Function

import torch2ort
from tests.support.comparison import assert_same

WAYS = ["ORTModule", "torch.compile"]


def trained(way: str, model: torch.nn.Module) -> torch.nn.Module:
    """``model`` on ONNX Runtime, its Functions as calls of their own."""
    if way == "ORTModule":
        return torch2ort.ORTModule(model)
    torch.compiler.reset()
    return torch.compile(model, backend="torch2ort", options={"keep_functions": True})


def assert_trains_alike(model: torch.nn.Module, way: str, steps: int = 2) -> None:
    """Compare gradients and buffers after several accumulating backward passes with eager PyTorch's."""
    twin, x = copied(model), torch.randn(2, 4)
    module = trained(way, model)
    for _ in range(steps):
        module(x).square().sum().backward()
        twin(x).square().sum().backward()
    expected = dict(twin.named_buffers()) | {name: p.grad for name, p in twin.named_parameters()}
    actual = dict(model.named_buffers()) | {name: p.grad for name, p in model.named_parameters()}
    assert_same(actual, expected, way)


def copied(model: torch.nn.Module) -> torch.nn.Module:
    """A copy, with the attributes of the parameters, which a copy of a parameter lacks."""
    twin = copy.deepcopy(model)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        vars(theirs).update(copy.deepcopy(vars(ours)))
    return twin


class Calling(torch.nn.Module):
    """``call`` of a linear layer's result."""

    def __init__(self, call) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.call = call

    def forward(self, x):
        return self.call(self, self.linear(x))


class Twice(Function):
    """Returns one tensor in the first and the last place."""

    @staticmethod
    def forward(ctx, x):
        y = x * 2
        return y, x * 3, y

    @staticmethod
    def backward(ctx, first, other, last):
        return first * 2 + other * 3 + last * 5


def read_both(model, h):
    first, other, last = Twice.apply(h)
    return first.relu() + other + 2 * last.relu()


def written(model, h):
    first, _, last = Twice.apply(h)
    first.mul_(3)
    return last.sigmoid()


def compared(model, h):
    first, other, last = Twice.apply(h)
    return first if first is last and first is not other else first * 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", [read_both, written, compared])
def test_a_tensor_that_is_returned_twice_is_one_tensor(call, way) -> None:
    assert_trains_alike(Calling(call), way)


class SometimesTwice(Function):
    """Returns one tensor twice for small numbers, and a copy for large ones."""

    @staticmethod
    def forward(ctx, x):
        y = x * 2
        return y, y.clone() if x.sum() > 1e3 else y

    @staticmethod
    def backward(ctx, first, last):
        return first * 2 + last * 3


def test_a_run_that_returns_two_tensors_in_place_of_one_is_refused() -> None:
    model = Calling(lambda model, h: sum(SometimesTwice.apply(h)))
    torch.nn.init.eye_(model.linear.weight)
    module = torch2ort.ORTModule(model)
    module(torch.zeros(2, 4))
    message = (
        f"{SometimesTwice.__module__}.SometimesTwice: forward returns two tensors as outputs 0 and 1, but "
        "returned one tensor for both when it was exported, of which the last output gets the gradient. "
        "Return output 0 as a clone() always"
    )
    with pytest.raises(torch2ort.EngineError) as raised:
        module(torch.full((2, 4), 1e3))
    assert str(raised.value) == message


class Again(Function):
    """Runs a module without a graph, and again in backward, where autograd is asked for all gradients."""

    @staticmethod
    def forward(ctx, module, x, *parameters):
        ctx.module = module
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, grad):
        x, *parameters = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.module(x)
        return None, *torch.autograd.grad(y, (x, *parameters), grad, allow_unused=True)


class Sees(Function):
    """Multiplies by ``question`` of a parameter, in forward and in backward."""

    @staticmethod
    def forward(ctx, x, weight, question):
        ctx.question = question
        ctx.save_for_backward(x, weight)
        return x @ weight.T * question(weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        factor = ctx.question(weight)
        return grad @ weight * factor, grad.T @ x * factor, None


class Seen(torch.nn.Module):
    """A model whose Function queries its parameter."""

    def __init__(self, question) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        self.weight = torch.nn.Parameter(torch.randn(4, 4))
        self.weight.scale = 2.5
        self.question = question

    def forward(self, x):
        return Sees.apply(self.inner(x), self.weight, self.question)


QUESTIONS = {
    "attribute": lambda weight: weight.scale,
    "attribute or default": lambda weight: getattr(weight, "scale", 1.0),
    "kind": lambda weight: 2.0 if isinstance(weight, torch.nn.Parameter) else 1.0,
    "gradient": lambda weight: 2.0 if weight.grad is None else 3.0,
    "leaf": lambda weight: 2.0 if weight.is_leaf else 3.0,
}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("way", WAYS)
def test_a_function_sees_of_a_parameter_what_eager_shows(question, way) -> None:
    assert_trains_alike(Seen(QUESTIONS[question]), way)


@pytest.mark.parametrize("question", QUESTIONS)
def test_without_gradients_a_function_sees_it_too(question) -> None:
    model, x = Seen(QUESTIONS[question]), torch.randn(2, 4)
    module = torch2ort.ORTModule(model)
    with torch.no_grad():
        torch.testing.assert_close(module(x), model(x))


def test_an_attribute_that_changes_between_steps_is_seen() -> None:
    model, x = Seen(QUESTIONS["attribute"]), torch.randn(2, 4)
    module = torch2ort.ORTModule(model)
    module(x)
    model.weight.scale = 4.0
    torch.testing.assert_close(module(x), model(x))


class Nested(torch.nn.Module):
    """A Function gets a module together with its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.head(Again.apply(self.inner, x, *self.inner.parameters()))


@pytest.mark.parametrize("way", WAYS)
def test_autograd_finds_the_parameters_that_are_arguments(way) -> None:
    assert_trains_alike(Nested(), way)


class Accumulates(Function):
    """Adds the gradient of the weight to a tensor of its caller's, as Megatron does."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        weight.main_grad.add_(grad.T @ x)
        return grad @ weight, None


def test_a_gradient_is_added_to_an_attribute_of_its_parameter() -> None:
    def made():
        model = Calling(lambda model, h: Accumulates.apply(h, model.weight))
        model.weight = torch.nn.Parameter(torch.eye(4))
        model.weight.main_grad = torch.zeros(4, 4)
        return model

    model, x = made(), torch.randn(2, 4)
    twin = copied(model)
    module = torch2ort.ORTModule(model)
    for _ in range(2):
        module(x).square().sum().backward()
        twin(x).square().sum().backward()
    assert_same(model.weight.main_grad, twin.weight.main_grad, "main_grad")


class Tagged(Function):
    """Looks for an attribute of its argument, and sets one on its output."""

    @staticmethod
    def forward(ctx, x):
        y = x * (2 if getattr(x, "tag", None) else 3)
        y.mark = 1
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def tagged(model, h):
    h.tag = True
    return Tagged.apply(h)


def marked(model, h):
    y = Tagged.apply(h)
    return y * 2 if getattr(y, "mark", None) else y


class AddsInto(Function):
    """Writes to its first argument and reads the other."""

    @staticmethod
    def forward(ctx, x, y):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x, x + y

    @staticmethod
    def backward(ctx, a, b):
        return a * 2 + b, b


def added(model, h):
    h = h * 1
    return sum(AddsInto.apply(h, h))


REFUSED = {
    tagged: "Tagged: argument 0 was computed and has the attribute tag, which a graph does not pass on. Pass "
    "its value as an argument of its own",
    added: "AddsInto: forward writes to argument 0, which is argument 1, too, and a graph gives it two "
    "tensors. Pass a clone() as one of them",
}


@pytest.mark.parametrize("call", REFUSED)
def test_what_a_graph_does_not_hand_on_is_refused(call) -> None:
    with pytest.raises(torch2ort.ExportError, match=f"^{re.escape(f'{__name__}.{REFUSED[call]}')}$"):
        torch2ort.ORTModule(Calling(call))(torch.randn(2, 4))


def test_an_attribute_of_an_output_that_the_model_reads_is_refused() -> None:
    message = (
        f"the model reads the attribute mark of output 0 after {__name__}.Tagged.forward wrote to it; a "
        "graph does not hold what a Function leaves in Python objects. Return it from forward, as a tensor "
        "where it varies"
    )
    with pytest.raises(torch2ort.ExportError, match=f"^{re.escape(message)}$"):
        torch2ort.ORTModule(Calling(marked))(torch.randn(2, 4))


def test_an_attribute_of_an_output_that_nobody_reads_is_no_matter() -> None:
    assert_trains_alike(Calling(lambda model, h: Tagged.apply(h)), "ORTModule")
