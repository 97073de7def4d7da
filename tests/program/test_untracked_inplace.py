"""A write that autograd does not see into a tensor with a gradient is refused; others match eager PyTorch."""

from __future__ import annotations

import re

import pytest
import torch

import torch2ort
from tests.support.comparison import assert_trains_like_eager


class Around(torch.nn.Module):
    """``write`` gets a tensor that requires a gradient, and returns the model's result."""

    def __init__(self, write) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self._write = write

    def forward(self, x):
        return self._write(self.layer(x))


def under_no_grad(h):
    with torch.no_grad():
        h.mul_(0.5)
    return h


def part_under_no_grad(h):
    with torch.no_grad():
        h[:, 1:].mul_(0.5)
    return h


def through_detach(h):
    h.detach().mul_(0.5)
    return h


def through_data(h):
    h.data.mul_(0.5)
    return h


def through_a_view_of_detach(h):
    h.detach().view(-1)[2:] = 0
    return h.sin()


class Silent(torch.autograd.Function):
    """Writes into its argument without mark_dirty."""

    @staticmethod
    def forward(ctx, x):
        x.mul_(0.5)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def inside_a_function(h):
    return Silent.apply(h) + h


def view_before_the_write(h):
    half = h[:, :2]
    with torch.no_grad():
        h.mul_(0.5)
    return half


NOT_SEEN = (
    " writes into a tensor that requires a gradient, where autograd does not see it: inside "
    "torch.no_grad() or through a detached tensor. Eager PyTorch keeps the gradient of what was there "
    "before, and a graph cannot. Compute a new tensor instead of writing into that one"
)
HIDDEN = [
    *(under_no_grad, part_under_no_grad, through_detach, through_data, through_a_view_of_detach),
    *(inside_a_function, view_before_the_write),
]


@pytest.mark.parametrize("write", HIDDEN, ids=lambda write: write.__name__)
def test_a_hidden_write_is_refused_before_a_step(write):
    with pytest.raises(torch2ort.UnsupportedOperatorError) as caught:
        torch2ort.ORTModule(Around(write))(torch.randn(3, 4))
    assert str(caught.value).endswith(NOT_SEEN)


def test_a_hidden_write_into_an_argument_is_refused_where_a_view_from_before_is_returned():
    class Views(torch.nn.Module):
        def forward(self, y):
            half = y[:2]
            with torch.no_grad():
                y.mul_(0.5)
            return half

    with pytest.raises(torch2ort.UnsupportedOperatorError) as caught:
        torch2ort.ORTModule(Views())(torch.ones(4, requires_grad=True))
    assert str(caught.value).startswith("aten.mul_.Tensor at ")
    assert str(caught.value).endswith(NOT_SEEN)


def argument_of(h):
    y = h.sin()
    h.data.mul_(0.5)
    return y


def result_of(h):
    y = h.sigmoid()
    z = y * 2
    y.data.mul_(0.5)
    return z


def view_of_an_argument(h):
    y = h[:, :2].sin()
    h.data.mul_(0.5)
    return y


def what_has_no_gradient(h):
    scale = torch.full((3, 4), 2.0)
    y = h * scale
    scale.data.mul_(0.5)
    return y


def what_was_read_detached(h):
    scale = torch.full((3, 4), 2.0)
    y = h * scale.data
    scale.mul_(0.5)
    return y


def one_of_several_results(h):
    values, indices = h.sort(dim=1)
    indices.data.zero_()
    return values


def part_under_no_grad_of_a_result(h):
    y = h.exp()
    z = y * 2
    with torch.no_grad():
        y[0] = 0
    return z


SAVED = {
    argument_of: "aten.sin.default",
    result_of: "aten.sigmoid.default",
    view_of_an_argument: "aten.sin.default",
    what_has_no_gradient: "aten.mul.Tensor",
    what_was_read_detached: "aten.mul.Tensor",
    one_of_several_results: "aten.sort.default",
    part_under_no_grad_of_a_result: "aten.exp.default",
}


@pytest.mark.parametrize(("write", "reader"), SAVED.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_hidden_write_to_what_a_derivative_reads_is_refused(write, reader):
    with pytest.raises(torch2ort.UnsupportedOperatorError) as caught:
        torch2ort.ORTModule(Around(write))(torch.randn(3, 4))
    message = (
        rf"aten\.\S+ at .* writes into a tensor that the derivative of {re.escape(reader)} at .* reads, "
        r"where autograd does not see it: inside torch\.no_grad\(\) or through a detached tensor\. Eager "
        r"PyTorch refuses the backward, or reads what was written, and a graph cannot\. Write into a clone "
        r"of it"
    )
    assert re.fullmatch(message, str(caught.value))


def test_a_hidden_write_needs_no_gradient_in_inference():
    model, x = Around(under_no_grad).requires_grad_(False), torch.randn(3, 4)
    torch.testing.assert_close(torch2ort.ORTModule(model)(x), model(x))


def of_its_own_memory(h):
    with torch.no_grad():
        scale = h * 2
        scale.mul_(3)
    return h * scale


def into_a_copy(h):
    copy = h.detach().clone()
    copy.clamp_(-1, 1)
    return h + copy


def into_what_has_no_gradient(h):
    mask = torch.zeros(3, 4)
    with torch.no_grad():
        mask[:, 0] = h[:, 0]
    mask += h
    return mask * h


def with_gradient_inside(h):
    with torch.no_grad():
        cut = h * 2
        with torch.enable_grad():
            through = h * 3 + cut
    return cut * through


def what_nobody_reads_again(h):
    twice = h * 2
    h.detach().zero_()
    return twice


def what_no_derivative_reads(h):
    half, total, rest = h[:, :2] * 2, h.sum(), h.clone()
    h.data.zero_()
    return half + total, rest


def argument_of_what_keeps_its_result(h):
    y = h.exp()
    h.data.zero_()
    return y


def another_factor(h):
    scale = torch.full((3, 4), 2.0)
    y = h.detach() * scale
    scale.data.mul_(0.5)
    return y + h


def seen_by_autograd(h):
    h[:, :2] = h[:, 2:] * 2
    return h.tanh()


ALLOWED = [
    *(of_its_own_memory, into_a_copy, into_what_has_no_gradient, with_gradient_inside),
    *(what_nobody_reads_again, what_no_derivative_reads, argument_of_what_keeps_its_result),
    *(another_factor, seen_by_autograd),
]


@pytest.mark.parametrize("write", ALLOWED, ids=lambda write: write.__name__)
def test_other_writes_are_eagers(write):
    assert_trains_like_eager(Around(write), [(torch.randn(3, 4),)], steps=2)


class Lists(torch.autograd.Function):
    """Stores its argument or its result where autograd does not look."""

    @staticmethod
    def forward(ctx, x, which):
        result = x * 2
        ctx.kept = [x if which == "argument" else result]
        return result

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.kept[0], None


def writes_to_the_result(h):
    result = Lists.apply(h, "result")
    result.mul_(3)
    return result


def writes_to_a_part_of_the_result(h):
    result = Lists.apply(h, "result")
    result[:, 1:] += 1
    return result


def writes_to_the_argument(h):
    h = h * 1
    result = Lists.apply(h, "argument")
    h.mul_(3)
    return result + h


@pytest.mark.parametrize(
    "write", [writes_to_the_result, writes_to_a_part_of_the_result, writes_to_the_argument]
)
def test_a_write_to_what_a_function_holds_for_its_backward_is_refused(write):
    message = (
        r"^aten\.\S+ at .* writes into a tensor that \S+Lists holds for its backward\. Eager PyTorch refuses "
        r"the backward, or reads what was written, and a graph cannot\. Write into a clone of it$"
    )
    with pytest.raises(torch2ort.UnsupportedOperatorError, match=message):
        torch2ort.ORTModule(Around(write))(torch.ones(2, 4))


@pytest.mark.parametrize("held", ["argument", "result"])
def test_a_write_to_what_a_function_does_not_hold_is_eagers(held):
    def write(h):
        h = h * 1
        result = Lists.apply(h, held)
        other = h if held == "result" else result
        other.mul_(3)
        return result + h

    assert_trains_like_eager(Around(write), [(torch.ones(2, 4),)], steps=3)
