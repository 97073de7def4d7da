"""Side effects of a backward occur as in eager PyTorch, or are refused by name before the first step."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest
import torch
from torch.autograd import Function

import torch2ort
from tests.support.comparison import assert_same

NAME = f"{__name__}."


class Reads(Function):
    """Saves a buffer for backward, in one of two ways."""

    @staticmethod
    def forward(ctx, x, seen, saves):
        if saves:
            ctx.save_for_backward(seen)
        else:
            ctx.seen = seen
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        seen = ctx.saved_tensors[0] if ctx.saved_tensors else ctx.seen
        seen.add_(grad.abs().max())
        return grad * 0.5, None, None


class Writes(Function):
    """Writes to a buffer in forward, too."""

    @staticmethod
    def forward(ctx, x, seen):
        seen.copy_(torch.maximum(seen, x.detach().abs().max()))
        ctx.seen = seen
        return x * seen

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.add_(grad.abs().max())
        return grad * 0.5, None


class Backward(Function):
    """Backward returns ``back`` of the saved tensor and the gradient."""

    @staticmethod
    def forward(ctx, x, back):
        y = x * 2
        ctx.save_for_backward(x, y)
        ctx.back = back
        return y

    @staticmethod
    def backward(ctx, grad):
        return ctx.back(*ctx.saved_tensors, grad), None


class Net(torch.nn.Module):
    """A Function, behind a linear layer and in front of a transposition."""

    def __init__(self, call) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.call = call

    def forward(self, x):
        return self.call(self.linear(x), self.seen).T


def assert_trains_alike(call) -> None:
    """Compare gradients and buffers after two accumulating backward passes with eager PyTorch's."""
    model, x = Net(call), torch.randn(3, 4)
    twin = copy.deepcopy(model)
    module = torch2ort.ORTModule(model)
    for _ in range(2):
        module(x).square().sum().backward()
        twin(x).square().sum().backward()
    assert_same(model.seen, twin.seen, "buffer")
    assert_same(model.linear.weight.grad, twin.linear.weight.grad, "gradient")


def assert_refused(call, message: str) -> None:
    """Assert that ``message`` is raised before the first step."""
    with pytest.raises(torch2ort.ExportError, match=f"^{re.escape(NAME + message)}$"):
        torch2ort.ORTModule(Net(call))(torch.randn(3, 4))


@pytest.mark.parametrize("saves", [True, False])
def test_a_buffer_that_backward_writes_to_is_written(saves) -> None:
    assert_trains_alike(lambda h, seen: Reads.apply(h, seen, saves))


def test_a_backward_that_writes_where_forward_writes_is_refused() -> None:
    assert_refused(
        Writes.apply,
        "Writes: backward writes to argument 1, to which forward writes, too, and a graph loses that. Write "
        "to a buffer that forward only reads, or return the value from forward",
    )


def test_a_backward_that_writes_to_a_buffer_that_the_model_changed_is_refused() -> None:
    def changed(h, seen):
        seen.add_(1)
        return Reads.apply(h, seen, False)

    message = (
        f"{NAME}Reads: backward writes to argument 1, which the model changed in front of the call, and a "
        "graph loses that. Change it behind the call, or return the value from forward"
    )
    with pytest.raises(torch2ort.UnsupportedOperatorError, match=f"^{re.escape(message)}$"):
        torch2ort.ORTModule(Net(changed))(torch.randn(3, 4))


WRITES = {
    "argument 0, which the model computed,": lambda x, y, grad: x.add_(1) * grad,
    "output 0,": lambda x, y, grad: y.add_(1) * grad,
}


@pytest.mark.parametrize("what", WRITES)
def test_a_backward_that_writes_to_what_is_computed_is_refused(what) -> None:
    assert_refused(
        lambda h, seen: Backward.apply(h, WRITES[what]),
        f"Backward: backward writes to {what} and a graph loses that. Write to a buffer that forward only "
        "reads, or return the value from forward",
    )


SAME_EITHER_WAY = {
    "made contiguous": lambda x, y, grad: (grad if grad.is_contiguous() else grad.contiguous()) * 2,
    "strides as numbers": lambda x, y, grad: grad * len(grad.stride()),
    "numpy": lambda x, y, grad: torch.from_numpy(np.tanh(grad.numpy())),
    "written in place": lambda x, y, grad: grad.mul_(2) + 0,
}
OTHERWISE = {
    "contiguous": lambda x, y, grad: grad * (2 if grad.is_contiguous() else 3),
    "stride": lambda x, y, grad: grad * (2 if grad.stride(0) == 1 else 3),
    "numpy": lambda x, y, grad: grad * sum(grad.numpy().strides[:1]),
}


@pytest.mark.parametrize("question", SAME_EITHER_WAY)
def test_a_backward_that_computes_the_same_for_contiguous_gradients_trains(question) -> None:
    assert_trains_alike(lambda h, seen: Backward.apply(h, SAME_EITHER_WAY[question]))


@pytest.mark.parametrize("question", OTHERWISE)
def test_a_backward_that_computes_something_else_for_them_is_refused(question) -> None:
    assert_refused(
        lambda h, seen: Backward.apply(h, OTHERWISE[question]),
        "Backward: backward reads the memory layout of tensors and computes other values for contiguous "
        "ones, and in a graph all are contiguous. Call .contiguous() on the gradients at its start, or make "
        "it compute the same for both",
    )


@pytest.mark.parametrize("name", ["is_leaf", "grad_fn"])
def test_a_backward_that_asks_where_an_argument_comes_from_is_refused(name) -> None:
    assert_refused(
        lambda h, seen: Backward.apply(h, lambda x, y, grad: grad * (2 if getattr(x, name) else 3)),
        f"Backward: backward asks for {name} of argument 0, which in a graph has no history: each run would "
        "answer as for a leaf that is not a view. Read it before apply, and pass the answer as an argument",
    )


@pytest.mark.parametrize("name", ["is_leaf", "grad_fn", "requires_grad"])
def test_a_backward_that_asks_where_an_output_comes_from_is_refused(name) -> None:
    assert_refused(
        lambda h, seen: Backward.apply(h, lambda x, y, grad: grad * (2 if getattr(y, name) else 3)),
        f"Backward: backward asks for {name} of output 0, which in a graph has no history. Save what "
        "backward needs to know of it in an attribute of ctx",
    )


class Forward(Function):
    """Calls ``run`` in forward."""

    @staticmethod
    def forward(ctx, x, run):
        with torch.enable_grad():
            run(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


@pytest.mark.parametrize("name", ["register_hook", "retain_grad"])
def test_a_forward_that_hooks_a_gradient_of_the_graph_is_refused(name) -> None:
    def run(x):
        getattr(x, name)(*([lambda grad: grad * 5] if name == "register_hook" else []))

    assert_refused(
        lambda h, seen: Forward.apply(h, run),
        f"Forward: forward calls {name}() of argument 0, whose gradient exists only inside of a graph. "
        "Process the gradient in backward instead",
    )


def test_a_forward_that_backpropagates_into_the_model_is_refused() -> None:
    assert_refused(
        lambda h, seen: Forward.apply(h, lambda x: (x**3).sum().backward()),
        "Forward: forward calls backward() through argument 0, which in eager PyTorch continues to the "
        "operators that computed it, and in a graph ends there. Call it on a detach() of the argument, or "
        "use torch.autograd.grad",
    )


def test_a_forward_that_asks_autograd_for_a_gradient_trains() -> None:
    def run(x):
        (found,) = torch.autograd.grad((x**3).sum(), x)
        assert found.shape == x.shape

    assert_trains_alike(lambda h, seen: Forward.apply(h, run))


def test_what_a_backward_leaves_in_python_objects_at_export_is_gone() -> None:
    calls = []

    def back(x, y, grad):
        calls.append(1)
        return grad * 1

    module = torch2ort.ORTModule(Net(lambda h, seen: Backward.apply(h, back)))
    output = module(torch.randn(3, 4))
    assert calls == []
    output.sum().backward()
    assert calls == [1]
