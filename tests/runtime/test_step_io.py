"""Values pass through a step without a copy, in C++ or by onnxruntime's Python API, with equal results."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import torch2ort
from tests.support.functions import Square
from torch2ort.pythonop.native import native
from torch2ort.runtime import onnxruntime, step_session, stock
from torch2ort.runtime.custom_op.output_allocator import lent_allocator
from torch2ort.runtime.ortvalues import shares_memory

OPTIONS = torch2ort.Options()


class Net(nn.Module):
    """A weight that is used twice, a buffer, and outputs that backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("shift", torch.randn(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = Square.apply(self.layer(x) * self.scale + self.shift).tanh()
        return y, (self.layer(y) * self.scale).exp()


@pytest.fixture(params=["in C++", "by Python"])
def way(request, monkeypatch) -> str:
    """Profiled sessions run by the Python API; so do all with an older onnxruntime."""
    if request.param == "by Python":
        monkeypatch.setattr(step_session, "active_tracer", lambda: object())
    return request.param


def shares_its_environment() -> bool:
    settings = onnxruntime().SessionOptions()
    stock.register_library(settings)
    with lent_allocator(settings) as lent:
        return lent


def steps(module, inputs, again=False):
    """Outputs and gradients of a step on each input."""
    found = []
    for x in inputs:
        module.zero_grad()
        x = x.detach().requires_grad_()
        outputs = module(x)
        loss = sum(output.sum() for output in outputs)
        if again:
            loss.backward(retain_graph=True)
        loss.backward()
        found += [*outputs, x.grad, *(p.grad for p in module.parameters())]
    return [tensor.detach().clone() for tensor in found]


def compare(model, inputs, **options):
    module = torch2ort.ORTModule(copy.deepcopy(model), options=OPTIONS)
    torch.testing.assert_close(steps(module, inputs, **options), steps(model, inputs, **options))


def test_it_is_in_cpp_where_onnxruntime_shares_its_environment(monkeypatch):
    made = []
    original = step_session.native_half
    monkeypatch.setattr(step_session, "native_half", lambda *given: made.append(original(*given)) or made[-1])
    steps(torch2ort.ORTModule(Net(), options=OPTIONS), [torch.randn(2, 4)])
    assert len(made) == (2 if shares_its_environment() else 0)


@pytest.mark.parametrize("again", [False, True])
def test_steps_are_eagers(way, again):
    compare(Net(), [torch.randn(3, 4), torch.randn(3, 4)], again=again)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(4, 3).t(),
        torch.randn(1, 4).expand(3, 4),
        torch.randn(6, 4)[::2],
        torch.randn(0, 4),
        torch.imag(torch.randn(1, 4, dtype=torch.complex64).conj()),
        torch._neg_view(torch.randn(3, 4)),
    ],
    ids=["transposed", "expanded", "with gaps", "empty", "negative with gaps", "negative"],
)
def test_inputs_may_lie_in_any_way(way, x):
    compare(Net(), [x])


def test_an_input_without_dimensions(way):
    class Times(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(3.0))

        def forward(self, x):
            return Square.apply(x * self.weight), x.exp()

    compare(Times(), [torch.tensor(0.3), torch.tensor(-1.0)])


def test_a_weight_is_read_where_it_is_now(way):
    model = Net()
    module = torch2ort.ORTModule(copy.deepcopy(model), options=OPTIONS)
    x = torch.randn(3, 4)
    steps(module, [x])
    for moved in (model, module.module):
        moved.layer.weight.data = moved.layer.weight.data.clone() * 2
        moved.layer.bias.data.add_(1)
        moved.shift = moved.shift * 3
    torch.testing.assert_close(steps(module, [x]), steps(model, [x]))


@pytest.mark.skipif(not shares_memory(), reason="this onnxruntime copies its feeds")
def test_what_backward_reads_is_let_go_with_it(way):
    module = torch2ort.ORTModule(Net(), options=OPTIONS)
    for _ in range(2):
        sum(output.sum() for output in module(torch.randn(3, 4))).backward()
    gc.collect()
    x = torch.randn(3, 4)
    loss = sum(output.sum() for output in module(x))
    held = native.holders(x)
    loss.backward()
    gc.collect()
    assert held > 1
    assert native.holders(x) == 1


def test_what_backward_reads_outlives_the_callers_tensor(way):
    model = Net()
    module = torch2ort.ORTModule(copy.deepcopy(model), options=OPTIONS)
    x = torch.randn(3, 4)
    steps(module, [x])
    module.zero_grad()
    loss = sum(output.sum() for output in module(x.clone()))
    fill = [torch.full((3, 4), 7.0) for _ in range(8)]
    loss.backward()
    assert len(fill) == 8
    model.zero_grad()
    sum(output.sum() for output in model(x)).backward()
    torch.testing.assert_close([p.grad for p in module.parameters()], [p.grad for p in model.parameters()])


def test_backwards_may_come_in_another_order(way):
    model = Net()
    module = torch2ort.ORTModule(copy.deepcopy(model), options=OPTIONS)
    inputs = [torch.randn(3, 4) for _ in range(3)]
    found = []
    for one in (model, module):
        one.zero_grad()
        losses = [sum(output.sum() for output in one(x)) for x in inputs]
        for i in (1, 2, 0):
            losses[i].backward()
        found.append([p.grad for p in one.parameters()])
    torch.testing.assert_close(found[1], found[0])
