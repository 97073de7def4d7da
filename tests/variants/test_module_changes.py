"""Changes to a module between two calls take effect in the next one."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

import torch2ort
from tests.support.comparison import assert_same

nn = torch.nn


class Model(nn.Module):
    """A model whose result depends on its sizes in more ways than that of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("offsets", torch.arange(4.0))

    def forward(self, x):
        return self.layer(x).mean(1, keepdim=True) * self.layer.out_features + self.offsets.cumsum(0)


def resize_buffer(model: Model) -> None:
    model.offsets = torch.arange(6.0)


def resize_buffer_in_place(model: Model) -> None:
    model.offsets.resize_(6).copy_(torch.arange(6.0))


def replace_layer(model: Model) -> None:
    torch.manual_seed(1)
    model.layer = nn.Linear(4, 7)


def set_data(model: Model) -> None:
    for parameter in model.layer.parameters():
        parameter.data = torch.ones(3, *parameter.shape[1:])


CHANGES = [resize_buffer, resize_buffer_in_place, replace_layer, set_data]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_another_size_is_seen(change: Callable[[Model], None], training: bool):
    model = Model()
    wrapped = torch2ort.ORTModule(copy.deepcopy(model))
    x = torch.randn(2, 4)
    results = []
    for module in (model, wrapped):
        module.train(training)
        module(x).sum().backward()
        change(module)
        module.zero_grad()
        result = module(x)
        result.square().sum().backward()
        results.append((result.detach(), {n: p.grad for n, p in module.named_parameters()}))
    (expected, expected_gradients), (actual, gradients) = results
    assert_same(actual, expected, "output")
    for name, gradient in expected_gradients.items():
        assert_same(gradients[name], gradient, name)


def test_a_parameter_of_another_dtype_is_refused_as_in_eager():
    model = nn.Linear(4, 4)
    wrapped = torch2ort.ORTModule(copy.deepcopy(model))
    x = torch.randn(2, 4)
    wrapped(x).sum().backward()
    for module in (model, wrapped):
        module.double()
        with pytest.raises(RuntimeError, match="must have the same dtype, but got") as caught:
            module(x)
    assert isinstance(caught.value, torch2ort.DtypeError)
    assert str(caught.value).endswith(
        ": its tensors must have the same dtype, but got torch.float32 and torch.float64. Convert the model "
        "and its inputs with .to(dtype)"
    )


def test_a_forward_hook_of_a_submodule_is_seen_when_it_comes_and_goes():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    wrapped = torch2ort.ORTModule(model)
    x = torch.randn(2, 4)
    torch.testing.assert_close(wrapped(x), model(x))
    handle = model[0].register_forward_hook(lambda module, args, output: output * 2)
    torch.testing.assert_close(wrapped(x), model(x))
    handle.remove()
    torch.testing.assert_close(wrapped(x), model(x))


def test_hooks_of_parameters_and_of_the_model_itself_run():
    model = nn.Linear(4, 4)
    model.weight.register_hook(lambda gradient: gradient * 2)
    model.register_full_backward_hook(lambda module, given, made: (given[0] * 3,))
    wrapped = torch2ort.ORTModule(model)
    x = torch.randn(2, 4)
    gradients = []
    for module in (model, wrapped):
        module.zero_grad()
        given = x.clone().requires_grad_()
        module(given).square().sum().backward()
        gradients.append((given.grad, module.weight.grad))
    for actual, expected in zip(gradients[1], gradients[0], strict=True):
        assert_same(actual, expected, "gradient")


class Set(nn.Module):
    """Reads settings, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale, self.activation, self.calls = 2.0, torch.tanh, 0

    def forward(self, x):
        if torch.compiler.is_exporting():
            self.calls += 1
        return self.activation(self.layer(x)) * self.scale


@pytest.mark.parametrize(("name", "value"), [("scale", 3.0), ("scale", None), ("activation", torch.sigmoid)])
def test_a_changed_setting_is_seen(name: str, value: object):
    class Model(Set):
        def forward(self, x):
            return super().forward(x) if self.scale is not None else self.layer(x)

    model = nn.Sequential(Model())
    wrapped = torch2ort.ORTModule(model)
    x = torch.randn(2, 4)
    torch.testing.assert_close(wrapped(x), model(x))
    setattr(model[0], name, value)
    torch.testing.assert_close(wrapped(x), model(x))


def test_a_count_of_calls_does_not_export_again_and_again():
    wrapped = torch2ort.ORTModule(Set())
    x = torch.randn(2, 4)
    wrapped(x)
    first = wrapped.exported
    wrapped(x)
    wrapped(x)
    assert wrapped.exported is first


def test_a_setting_that_changes_with_every_call_warns():
    model = nn.Sequential(Set())
    wrapped = torch2ort.ORTModule(model)
    x = torch.randn(2, 4)

    def run_with_scales():
        for scale in range(1, 7):
            model[0].scale = float(scale)
            torch.testing.assert_close(wrapped(x), model(x))

    with pytest.warns(torch2ort.Torch2OrtWarning) as caught:
        run_with_scales()
    assert [str(warning.message) for warning in caught] == [
        "Sequential: the attribute 'scale' of the Set '0' (it was 4.0, and is 5.0) changes from call to "
        "call, and each of its values gets a graph of its own, 5 so far. Pass what varies as a tensor, or "
        "keep it out of the model"
    ]


def test_an_attribute_that_is_no_setting_any_more_is_left_alone():
    model = Set()
    wrapped = torch2ort.ORTModule(model)
    model.scale, x = 2.0, torch.randn(2, 4)
    model.cache = None
    wrapped(x)
    for value in ([1], {"a": 2}, torch.ones(3), torch.ones(3)):
        model.cache = value
        torch.testing.assert_close(wrapped(x), model(x))
