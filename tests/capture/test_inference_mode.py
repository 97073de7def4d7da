"""Inference mode around a call, and inside of forward: all its effects are those of eager PyTorch."""

from __future__ import annotations

import copy
import re

import pytest
import torch

import torch2ort
from tests.support.comparison import assert_same

X = torch.arange(12.0).reshape(3, 4) / 7


class Asks(torch.autograd.Function):
    """A derivative that is wrong on purpose, and numbers that depend on whether a gradient is needed."""

    @staticmethod
    def forward(ctx, x):
        return x * (2.0 if ctx.needs_input_grad[0] else 3.0)

    @staticmethod
    def backward(ctx, grad):
        return grad * 5


class Model(torch.nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self._body = body

    def forward(self, x):
        return self._body(self, x)


def pair(body):
    torch.manual_seed(0)
    model = Model(body)
    return model, torch2ort.ORTModule(copy.deepcopy(model))


def computed(m, x):
    with torch.inference_mode():
        hidden = m.first(x)
    return m.last(x) + hidden


def decorated(m, x):
    return m.last(torch.inference_mode()(m.first)(x).clone())


def a_function(m, x):
    with torch.inference_mode():
        hidden = Asks.apply(m.first(x))
    return m.last(hidden.clone())


def a_view(m, x):
    with torch.inference_mode():
        weight = m.first.weight.t()
    return m.last(x) @ weight


def an_input(m, x):
    with torch.inference_mode():
        twice = x * 2
    return m.last(x) + twice


def returned(m, x):
    with torch.inference_mode():
        hidden = m.first(x)
    return m.last(x), hidden


def off_inside_of_no_grad(m, x):
    with torch.no_grad(), torch.inference_mode(False):
        hidden = m.first(x)
    return m.last(x) + hidden


def off_inside_of_on(m, x):
    with torch.inference_mode():
        with torch.inference_mode(False):
            hidden = m.first(x)
        twice = x * (2 if torch.is_grad_enabled() else 3)
    return m.last(x) + hidden + twice


REGIONS = [
    computed, decorated, a_function, a_view, an_input, returned, off_inside_of_no_grad, off_inside_of_on,
]  # fmt: skip


@pytest.mark.parametrize("body", REGIONS)
def test_what_is_computed_in_inference_mode_inside_of_forward_gets_no_gradient(body) -> None:
    found = []
    for module in pair(body):
        x = X.clone().requires_grad_()
        outputs = module(x)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        sum(output.square().sum() for output in outputs if output.requires_grad).backward()
        required = [output.requires_grad for output in outputs]
        found.append((required, [t.detach() for t in outputs], [t.grad for t in (x, *module.parameters())]))
    assert found[1][0] == found[0][0]
    for which, actual, expected in zip(("outputs", "gradients"), found[1][1:], found[0][1:], strict=True):
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert (a is None) == (e is None), f"{which} {i}"
            if e is not None:
                assert_same(a, e, f"{which} {i}")


def test_what_inference_mode_made_is_not_saved_for_backward_as_in_eager() -> None:
    def body(m, x):
        with torch.inference_mode():
            hidden = m.first(x)
        return m.last(hidden)

    for module in pair(body):
        with pytest.raises(RuntimeError, match=r"^Inference tensors cannot be saved for backward"):
            module(X)


def written(write):
    def body(m, x):
        with torch.inference_mode():
            hidden = m.first(x)
        write(hidden)
        return hidden + m.last(x)

    return body


WRITES = {
    "all of it": lambda hidden: hidden.mul_(2),
    "columns": lambda hidden: hidden.__setitem__((slice(None), slice(2, None)), 0.0),
    "a row": lambda hidden: hidden.__setitem__(0, X[0]),
    "a view": lambda hidden: hidden[:, 2:].mul_(2),
    "a mask": lambda hidden: hidden.__setitem__(hidden > 0, 0.0),
    "a part of an alias": lambda hidden: hidden.detach()[1:].add_(3),
    "an entry of an alias": lambda hidden: hidden.detach().__setitem__(1, 3.0),
}


@pytest.mark.parametrize("write", WRITES)
def test_nor_written_to_outside_of_it(write) -> None:
    expected, found = pair(written(WRITES[write]))
    with pytest.raises(RuntimeError) as error:
        expected(X)
    with pytest.raises(RuntimeError, match=f"^{re.escape(str(error.value))}$"):
        found(X)


DETACHED = {
    "detach": lambda hidden: hidden.detach().mul_(2),
    "data": lambda hidden: hidden.data.mul_(2),
    "detached of a part": lambda hidden: hidden[1:].detach().add_(3),
}


@pytest.mark.parametrize("how", DETACHED)
def test_a_detached_alias_of_it_is_written_to(how) -> None:
    expected, found = pair(written(DETACHED[how]))
    assert_same(found(X).detach(), expected(X).detach(), "output")


class Saves(torch.autograd.Function):
    """A product, which saves its factors, or keeps the first one as an attribute."""

    @staticmethod
    def forward(ctx, a, b, how):
        view = a.view(-1)
        ctx.save_for_backward(view if how == "view" else None if how == "attribute" else a, b)
        ctx.a, ctx.shape = a if how == "attribute" else None, a.shape
        return a * b

    @staticmethod
    def backward(ctx, gradient):
        a, b = ctx.saved_tensors
        a = ctx.a if a is None else a.view(ctx.shape)
        return gradient * b, gradient * a, None


def in_inference_mode(m, x):
    with torch.inference_mode():
        return m.first(x)


@pytest.mark.parametrize("how", ["itself", "view"])
@pytest.mark.parametrize("read", [True, False])
def test_nor_by_a_function_whose_result_is_read_or_not(how, read) -> None:
    def body(m, x):
        product = Saves.apply(in_inference_mode(m, x), m.last(x), how)
        return m.last(product) if read else m.last(x)

    for module in pair(body):
        with pytest.raises(RuntimeError, match=r"^Inference tensors cannot be saved for backward"):
            module(X)


FINE = {
    "an attribute": lambda m, x: Saves.apply(in_inference_mode(m, x), m.last(x), "attribute"),
    "a copy": lambda m, x: Saves.apply(in_inference_mode(m, x).clone(), m.last(x), "itself"),
    "no gradient": lambda m, x: Saves.apply(in_inference_mode(m, x), x, "itself") + m.last(x),
}


@pytest.mark.parametrize("name", FINE)
def test_what_inference_mode_made_and_nothing_saves_goes_through_functions(name) -> None:
    found = []
    for module in pair(FINE[name]):
        output = module(X)
        output.square().sum().backward()
        found.append([output.detach(), *(p.grad for p in module.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1])
    for actual, expected in zip(found[1], found[0], strict=True):
        assert_same(actual, expected, name)


def reads_requires_grad(m, x):
    with torch.enable_grad():
        hidden = m.first(x)
        return hidden * (2 if hidden.requires_grad else 3)


def a_function_asks(m, x):
    with torch.enable_grad():
        return Asks.apply(m.first(x))


def switched_by_an_argument(m, x):
    with torch.set_grad_enabled(True):
        hidden = m.first(x)
        with torch.no_grad():
            hidden = hidden * (2 if torch.is_grad_enabled() else 3)
        if torch.is_grad_enabled():
            hidden = hidden + 1
    return hidden * (2 if torch.is_grad_enabled() else 3)


def leaves_it(m, x):
    with torch.inference_mode(False):
        hidden = m.first(x)
        factor = 2 if hidden.requires_grad and not torch.is_inference_mode_enabled() else 3
        with torch.no_grad(), torch.inference_mode():
            factor += 10 * torch.is_inference_mode_enabled() + 20 * torch.is_grad_enabled()
    return m.last(x) * factor


@pytest.mark.parametrize("body", [reads_requires_grad, a_function_asks, switched_by_an_argument, leaves_it])
def test_gradients_switched_on_in_a_call_under_inference_mode_record_nothing(body) -> None:
    model, ort = pair(body)
    with torch.inference_mode():
        expected, actual = model(X), ort(X)
    assert_same(actual, expected, "output")
    assert not actual.requires_grad
    assert_same(ort(X).detach(), model(X).detach(), "output outside of inference mode")


def test_a_function_that_eager_records_inside_of_inference_mode_is_refused() -> None:
    def body(m, x):
        with torch.enable_grad():
            weight = Asks.apply(m.first.weight)
        return x @ weight

    _, ort = pair(body)
    text = (
        "Asks: called inside of torch.inference_mode() with gradients switched on, where eager PyTorch "
        "records it alone, and refuses it if it saves what inference mode made. Call the model under "
        "torch.no_grad() instead, or the Function without torch.enable_grad()"
    )
    with torch.inference_mode(), pytest.raises(torch2ort.ExportError, match=re.escape(text)):
        ort(X)


@pytest.mark.parametrize("asks", [torch.Tensor.is_inference, torch.is_inference])
def test_a_forward_that_asks_a_tensor_for_inference_mode_is_refused(asks) -> None:
    _, ort = pair(lambda m, x: m.first(x) * (2 if asks(x) else 3))
    text = (
        "asks whether a tensor was made in inference mode (is_inference), and one graph serves those that "
        "were and those that were not. Ask torch.is_inference_mode_enabled(), or ask in front of the call"
    )
    with pytest.raises(torch2ort.ExportError, match=re.escape(text)):
        ort(X)
