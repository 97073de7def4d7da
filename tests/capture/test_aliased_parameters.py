"""Parameters and buffers that forward reaches without their modules are the model's all the same."""

from __future__ import annotations

import copy

import pytest
import torch

import torch2ort
from tests.support.comparison import assert_same, assert_trains_like_eager
from tests.support.functions import Affine, Square

nn = torch.nn


class Holds(nn.Module):
    """Stores its tensors in containers that torch.export does not look into."""

    def __init__(self, body) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))
        self.held = {"weight": [self.layer.weight, self.layer.bias], "buffer": self.average}
        self.detached = (self.layer.bias.detach(),)
        self._body = body

    def forward(self, x):
        return self._body(self, x)


BODIES = {
    "parameter": lambda m, x: m.layer(x) * m.held["weight"][0].sum() + m.held["weight"][1],
    "parameter alone": lambda m, x: Square.apply(x @ m.held["weight"][0]),
    "argument of a Function": lambda m, x: Affine.apply(m.layer(x), m.held["weight"][1]),
    "list of them": lambda m, x: m.layer(x) + torch.stack(m.held["weight"][1:]).sum(0),
    "buffer": lambda m, x: m.layer(x) + m.held["buffer"],
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_a_held_tensor_trains_like_eager(body):
    torch.manual_seed(0)
    assert_trains_like_eager(Holds(body), [(torch.randn(3, 4, requires_grad=True),)], steps=4)


def test_a_detached_alias_has_the_present_values_and_no_gradient():
    model = Holds(lambda m, x: m.layer(x) * m.detached[0])
    wrapped = torch2ort.ORTModule(model)
    x = torch.randn(3, 4)
    gradients = []
    for _ in range(2):
        with torch.no_grad():
            model.layer.bias.add_(1)
        for module in (model, wrapped):
            module.zero_grad()
            module(x).sum().backward()
            gradients.append(module.layer.bias.grad)
        assert_same(gradients.pop(), gradients.pop(), "bias")


def test_a_held_buffer_that_forward_writes_to_is_refused():
    model = Holds(lambda m, x: m.layer(x) - m.held["buffer"].add_(1))
    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.ORTModule(model)(torch.ones(2, 4))
    assert str(caught.value) == (
        "Holds: forward writes to the buffer 'average', whose memory the model reads through another tensor, "
        "too. Read the buffer itself, or write to a clone of it"
    )


OUTSIDE = nn.Parameter(torch.ones(4))


class Uses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) * OUTSIDE


def test_a_parameter_that_is_none_of_the_models_is_refused():
    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.ORTModule(Uses())(torch.ones(2, 4))
    assert str(caught.value).startswith(f"Uses: {__file__}:")
    assert str(caught.value).endswith(
        "in forward (return self.layer(x) * OUTSIDE) uses a tensor that requires a gradient and is not a "
        "parameter of the model, so a graph would not compute its gradient. Make it a parameter of the "
        "model, or pass it as an argument"
    )


def test_it_is_refused_in_a_model_that_trains_nothing_of_its_own():
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = [nn.Linear(4, 4)]

        def forward(self, x):
            return self.held[0](x)

    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.ORTModule(Teacher())(torch.ones(2, 4))
    assert str(caught.value).startswith(f"Teacher: {__file__}:")
    assert str(caught.value).endswith(
        "in forward (return self.held[0](x)) uses a tensor that requires a gradient and is not a "
        "parameter of the model, so a graph would not compute its gradient. Make it a parameter of the "
        "model, or pass it as an argument"
    )


def test_it_serves_a_trained_model_under_no_grad():
    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.held = nn.Linear(4, 4), [nn.Linear(4, 4)]

        def forward(self, x):
            with torch.no_grad():
                wanted = self.held[0](x)
            return self.layer(x) - wanted

    model, x = Distilled(), torch.randn(2, 4)
    twin = copy.deepcopy(model)
    for run in (torch2ort.ORTModule(model), twin):
        run(x).pow(2).sum().backward()
    torch.testing.assert_close(model.layer.weight.grad, twin.layer.weight.grad)
    assert model.held[0].weight.grad is None


def test_it_is_no_matter_without_gradients():
    model, x = copy.deepcopy(Uses()).eval(), torch.randn(2, 4)
    torch.testing.assert_close(torch2ort.export(model, x)(x), model(x).detach())
