"""Writes to buffers and inputs between a forward and its backward, by the model and by its user."""

from __future__ import annotations

import copy

import pytest
import torch

import torch2ort
from tests.support.comparison import assert_same, assert_trains_like_eager
from tests.support.functions import Affine


class Assigning(torch.nn.Module):
    """A submodule that replaces a buffer's tensor."""

    def __init__(self, update) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("state", torch.ones(4))
        self._update = update

    def forward(self, x):
        hidden = self.layer(x) * self.state
        self.state = self._update(self.state, hidden)
        return hidden + self.state.sum()


def test_a_buffer_that_forward_assigns_to_is_updated():
    model = torch.nn.Sequential(Assigning(lambda state, hidden: state * 0.5 + hidden.detach().mean(0)))
    assert_trains_like_eager(model, [(torch.randn(3, 4, requires_grad=True),)], steps=4, lr=0.01)


class Averages(torch.nn.Module):
    """Its statistics are updated, and read again by the second call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4, momentum=None)

    def forward(self, x):
        return self.norm(self.norm(self.layer(x)) * 2)


def test_a_buffer_that_is_read_again_after_it_was_written_to_is_the_new_one():
    assert_trains_like_eager(Averages(), [(torch.randn(3, 4),)], steps=3, lr=0.01)


def test_a_buffer_that_a_graph_cannot_carry_on_warns():
    model = torch.nn.Sequential(Assigning(lambda state, hidden: hidden.sum(0)))
    with pytest.warns(torch2ort.Torch2OrtWarning) as caught:
        torch2ort.ORTModule(model)(torch.randn(3, 4))
    assert str(caught[0].message) == (
        "Sequential: forward assigns to its buffer '0.state' a float32 tensor of shape [4] that needs a "
        "gradient where it holds a float32 tensor of shape [4]. A graph does not carry that from call to "
        "call: "
        "each call starts with the buffer as it is now. Assign a detached tensor of the buffer's size and "
        "dtype if the next call is to see it"
    )


class Queue(torch.nn.Module):
    """Reads a buffer, and writes to it before the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.register_buffer("queue", torch.randn(6, 8))

    def forward(self, x):
        hidden = self.layer(x)
        scores = hidden @ self.queue.clone().t()
        with torch.no_grad():
            self.queue.copy_(torch.cat([self.queue[x.shape[0] :], hidden]))
        return scores


def test_backward_reads_a_buffer_as_it_was_before_forward_wrote_to_it():
    assert_trains_like_eager(Queue(), [(torch.randn(4, 8, requires_grad=True),)], steps=4, lr=0.01)


def test_a_second_backward_reads_a_buffer_as_it_was_before_forward_wrote_to_it():
    model = Queue()
    wrapped = torch2ort.ORTModule(copy.deepcopy(model))
    x = torch.randn(4, 8)
    gradients = []
    for module in (model, wrapped):
        output = module(x)
        output.square().sum().backward(retain_graph=True)
        output.sum().backward()
        gradients.append(module.layer.weight.grad)
    assert_same(gradients[1], gradients[0], "weight")


class Transposes(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x, y):
        return self.layer(x) @ y.t()


def test_an_input_that_is_written_to_before_backward_is_refused_although_only_its_transpose_is_read():
    wrapped = torch2ort.ORTModule(Transposes())
    y = torch.randn(2, 4)
    output = wrapped(torch.randn(3, 4), y)
    y.add_(1)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        output.sum().backward()


class Reads(torch.nn.Module):
    """Reads values of its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("shift", torch.tensor(3))

    def forward(self, x):
        return self.layer(x) * self.scale.item() + self.shift.item()


def test_a_number_that_forward_reads_out_of_a_buffer_is_the_present_one():
    model = Reads()
    wrapped = torch2ort.ORTModule(model)
    x = torch.randn(3, 4)
    for scale, shift in ((2.0, 3), (-1.5, 0)):
        model.scale.fill_(scale)
        model.shift.fill_(shift)
        gradients = []
        for module in (model, wrapped):
            module.zero_grad()
            module(x).square().sum().backward()
            gradients.append(module.layer.weight.grad)
        assert_same(gradients[1], gradients[0], "weight")


class Scales(torch.nn.Module):
    """A Function that saves a parameter and an input without computing on them first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return Affine.apply(x, self.weight)


@pytest.mark.parametrize("written", ["weight", "input"])
def test_what_a_function_saved_must_not_be_written_to_before_backward(written):
    for wrap in (lambda model: model, torch2ort.ORTModule):
        module = wrap(Scales())
        x = torch.randn(3, 4, requires_grad=True) * 1
        output = module(x)
        with torch.no_grad():
            (module.weight if written == "weight" else x).add_(1)
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            output.sum().backward()
