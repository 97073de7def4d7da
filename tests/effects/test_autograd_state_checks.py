"""Changes of a tensor's autograd state or of torch's modes in forward: as in eager PyTorch, or refused."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torch2ort
from tests.support.comparison import assert_same

X = torch.arange(8.0).reshape(2, 4) / 7


class Doubles(TorchDispatchMode):
    """Twice the tanh of its argument."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.tanh.default else result


class Model(torch.nn.Module):
    def __init__(self, body=None) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))
        self._body = body or (lambda m, x: m.last(torch.tanh(m.first(x))))

    def forward(self, x):
        return self._body(self, x)


def detaches_in_place(m, x):
    h = m.first(x)
    h.detach_()
    return m.last(h)


def sets_data_of(find):
    def body(m, x):
        h = m.first(x)
        tensor = find(m, x, h)
        tensor.data = tensor.data * 2
        return m.last(h) + m.total

    return body


def clears_gradients(m, x):
    m.zero_grad()
    return m.last(x)


def drops_a_gradient(m, x):
    m.last.weight.grad = None
    return m.last(x)


def freezes_for_a_while(m, x):
    m.first.requires_grad_(False)
    h = m.first(x)
    m.first.requires_grad_(True)
    return m.last(h)


def in_double_precision(m, x):
    torch.set_default_dtype(torch.float64)
    ones = torch.ones(4)
    torch.set_default_dtype(torch.float32)
    return m.last(x) * ones


def changes_operators(m, x):
    with Doubles():
        h = torch.tanh(m.first(x))
    return m.last(h)


DATA = (
    "sets the .data of a tensor, which a graph cannot do. Write a buffer's values with copy_(), or set it "
    "before the call"
)
GRAD = "uses the .grad of a tensor, which a graph cannot do. Do that before or after the call"
IN_PLACE = "detaches a tensor in place (detach_), which a graph cannot do. Write h = h.detach() instead"
REFUSED = {
    "detach_": (detaches_in_place, IN_PLACE),
    "torch.detach_": (lambda m, x: m.last(torch.detach_(m.first(x))), IN_PLACE),
    "data of an argument": (sets_data_of(lambda m, x, h: x), DATA),
    "data of a value": (sets_data_of(lambda m, x, h: h), DATA),
    "data of a buffer": (sets_data_of(lambda m, x, h: m.total), DATA),
    "data of a weight": (sets_data_of(lambda m, x, h: m.last.weight), DATA),
    "a gradient that is read": (lambda m, x: m.last(x) * (1 if m.last.weight.grad is None else 2), GRAD),
    "a gradient that is set": (drops_a_gradient, GRAD),
    "gradients that are cleared": (clears_gradients, GRAD),
    "a weight that is frozen for a while": (
        freezes_for_a_while,
        "switches the requires_grad of Model.first.weight, which a graph cannot do. Switch it before the "
        "call",
    ),
    "a default dtype for a while": (
        in_double_precision,
        "switches torch's default dtype, which a graph cannot do. Switch it before the call, or name the "
        "dtype",
    ),
    "a dispatch mode": (
        changes_operators,
        "enters the TorchDispatchMode Doubles, which a graph cannot do. Change the operators in a "
        "TorchFunctionMode, or run the mode around the original model",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_would_leave_out_is_refused_with_its_line(name) -> None:
    body, text = REFUSED[name]
    module = torch2ort.ORTModule(Model(body))
    with pytest.raises(torch2ort.ExportError, match=re.escape(text)) as caught:
        module(X.clone())
    assert str(caught.value).startswith(f"Model: {__file__}:")
    assert torch.get_default_dtype() == torch.float32
    assert all(p.requires_grad for p in module.parameters())


def detaches_what_needs_none(m, x):
    h = m.first(x).detach()
    h.detach_()
    x.detach_()
    return m.last(h)


def frozen_before(m, x):
    with torch.no_grad():
        h = m.first(x)
    return m.last(h.requires_grad_(False))


def the_dtype_that_is_set(m, x):
    torch.set_default_dtype(torch.float32)
    return m.last(m.first(x)) * torch.ones(4)


def a_buffer_that_is_copied_to(m, x):
    m.total.copy_(m.total + 1)
    return m.last(m.first(x)) + m.total


@pytest.mark.parametrize(
    "body", [detaches_what_needs_none, frozen_before, the_dtype_that_is_set, a_buffer_that_is_copied_to]
)
def test_what_changes_nothing_or_is_written_trains_like_eager(body) -> None:
    torch.manual_seed(0)
    model = Model(body)
    module = torch2ort.ORTModule(copy.deepcopy(model))
    for _ in range(2):
        expected, actual = model(X.clone()), module(X.clone())
        assert_same(actual.detach(), expected.detach(), "output")
        expected.square().sum().backward()
        actual.square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), module.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert_same(q.grad, p.grad, name)


def test_a_call_inside_of_a_dispatch_mode_is_refused_before_and_after_the_first() -> None:
    module = torch2ort.ORTModule(Model())
    text = (
        "ORTModule was called inside the TorchDispatchMode Doubles, which does not reach into a graph. Call "
        "the original model, ORTModule(...).module, there"
    )
    with Doubles(), pytest.raises(torch2ort.ExportError, match=re.escape(text)):
        module(X)
    module(X)
    with Doubles(), pytest.raises(torch2ort.ExportError, match=re.escape(text)):
        module(X)
