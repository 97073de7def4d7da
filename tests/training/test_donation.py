"""Backward owns large activations: each is freed after its last reader, and steps equal eager PyTorch's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import torch2ort
from tests.support.memory import resident_bytes
from torch2ort.runtime import onnxruntime, stock
from torch2ort.runtime.custom_op.output_allocator import lent_allocator

LARGE = 1 << 15


class Scaled(nn.Module):
    """Layers whose results are read in backward only, and whose weights are as large."""

    def __init__(self, layers: int, size: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((size,), 0.5) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.atan(x * weight)
        return x.sum()


class TwoEnds(nn.Module):
    """Two results, one of which is read by the backward of both."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 1.0, LARGE))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inner = torch.atan(x * self.weight)
        shown = torch.atan(inner * self.weight)
        return shown, torch.atan(shown * self.weight * inner)


def on_joint(model: nn.Module) -> nn.Module:
    return torch2ort.ORTModule(copy.deepcopy(model))


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def takes_memory() -> bool:
    settings = onnxruntime().SessionOptions()
    stock.register_library(settings)
    with lent_allocator(settings) as lent:
        return lent


@pytest.fixture
def model() -> nn.Module:
    return TwoEnds()


def both(model: nn.Module, use) -> None:
    found = []
    for module in (model, on_joint(model)):
        module.zero_grad()
        use(module)
        found.append(gradients(module))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.skipif(not takes_memory(), reason="this onnxruntime takes no allocator of ours")
@pytest.mark.skipif("config.getoption('device') != 'cpu'", reason="on a GPU nothing is donated")
def test_activations_are_free_while_backward_runs():
    layers, size = 8, 1 << 22
    module, x = on_joint(Scaled(layers, size)), torch.ones(size)
    on_joint(Scaled(2, LARGE))(torch.ones(LARGE)).backward()
    before = resident_bytes()
    module(x).backward()
    # Room for all activations, or for all gradients and little else, but not for both.
    assert resident_bytes() - before < (layers + 6) * x.nbytes


def test_activations_serve_each_backward_of_a_retained_graph(model):
    def use(module):
        shown, end = module(torch.ones(LARGE))
        for _ in range(2):
            (shown.sum() + end.sum()).backward(retain_graph=True)
        end.sum().backward()

    both(model, use)


def test_each_end_has_a_backward_of_its_own(model):
    def use(module):
        shown, end = module(torch.ones(LARGE))
        shown.sum().backward(retain_graph=True)
        end.sum().backward()

    both(model, use)


def test_forwards_before_their_backwards_keep_their_own(model):
    def use(module):
        results = [module(torch.full((LARGE,), float(i)))[1] for i in range(3)]
        for result in results:
            result.sum().backward()

    both(model, use)


def test_what_the_caller_holds_stays_as_it_is(model):
    module, x = on_joint(model), torch.ones(LARGE)
    shown, end = module(x)
    expected = [shown.clone(), end.clone()]
    (shown.sum() + end.sum()).backward()
    assert all(map(torch.equal, (shown, end), expected))


def test_memory_of_activations_goes_with_the_outputs_that_no_backward_came_for():
    module, x = on_joint(Scaled(6, 1 << 20)), torch.ones(1 << 20)
    module(x).backward()
    module(x)
    before = resident_bytes()
    for _ in range(8):
        module(x)
    assert resident_bytes() - before < 3 * x.nbytes
