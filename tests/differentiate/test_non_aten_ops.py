"""torch operators outside of ATen, tensors on other devices, and effects besides results."""

from __future__ import annotations

import re

import pytest
import torch

import torch2ort
from tests.support.comparison import assert_trains_like_eager
from torch2ort.errors import UnsupportedOperatorError


class Then(torch.nn.Module):
    """A layer, and a function of its result."""

    def __init__(self, function) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.function = function

    def forward(self, x):
        return self.function(self.layer(x))


def without_gradient(h):
    with torch.no_grad():
        scale = torch.ops.prims.exp(h)
    return h * scale


def with_its_own_formula(h):
    import torch.ao.quantization.fx._decomposed

    scales, zeros = torch.full((4,), 0.1), torch.zeros(4, dtype=torch.int32)
    return torch.ops.quantized_decomposed.fake_quant_per_channel(h, scales, zeros, 1, -128, 127)


@pytest.mark.parametrize(
    "function", [without_gradient, with_its_own_formula], ids=lambda function: function.__name__
)
def test_an_operator_that_is_none_of_atens_trains_like_eager(function):
    assert_trains_like_eager(Then(function), [(torch.randn(3, 4),)], steps=2)


def refusal(function) -> str:
    with pytest.raises(UnsupportedOperatorError) as caught:
        torch2ort.ORTModule(Then(function))(torch.randn(3, 4))
    return re.sub(r" at .*?:\d+, in forward: .*\)\)", " at LINE", str(caught.value))


def test_an_operator_whose_formula_refuses_is_refused_before_a_step():
    assert refusal(torch.ops.prims.sin) == (
        "PyTorch's autograd does not differentiate the program that torch.export traced (Trying to backward "
        "through prims.sin.default but no autograd formula was registered. Please use register_autograd to "
        "add one). Put the part of the model that it names into a torch.autograd.Function"
    )


LIBRARY = torch.library.Library("quantized_decomposed", "FRAGMENT")
LIBRARY.define("torch2ort_tests_doubled(Tensor x) -> Tensor")
LIBRARY.impl("torch2ort_tests_doubled", lambda x: x * 2, "CompositeExplicitAutograd")


def test_an_operator_through_whose_kernel_autograd_goes_is_refused():
    doubled = torch.ops.quantized_decomposed.torch2ort_tests_doubled
    torch2ort.register_symbolic(
        "quantized_decomposed::torch2ort_tests_doubled", lambda g, x: g.op("Mul", x, 2)
    )
    assert refusal(doubled) == (
        "quantized_decomposed.torch2ort_tests_doubled.default at LINE has no derivative that PyTorch knows. "
        "Register one with torch.library.register_autograd, or put the call into a torch.autograd.Function"
    )
    assert_trains_like_eager(Then(lambda h: h * doubled(h.detach())), [(torch.randn(3, 4),)], steps=2)


def test_tensors_without_numbers_whose_sizes_alone_are_read_train_like_eager():
    def scaled(h):
        image, kernel = torch.empty(1, 1, 8, device="meta"), torch.empty(1, 1, 3, device="meta")
        return h * torch.nn.functional.conv1d(image, kernel).shape[-1]

    assert_trains_like_eager(Then(scaled), [(torch.randn(3, 4),)], steps=2)


@pytest.mark.parametrize(
    ("device", "on"), [("meta", "meta"), ("cuda:1", "cuda:1")], ids=["without numbers", "another device"]
)
def test_a_tensor_on_another_device_is_refused(device, on):
    assert refusal(lambda h: (h, torch.empty(3, device=device))) == (
        f"aten.empty.memory_format at LINE gives a tensor on {on}, and a graph that is trained runs on one "
        f"device, here cpu. Make it there, or put all that computes with it into one torch.autograd.Function"
    )


def test_a_sparse_tensor_that_nobody_reads_trains_like_eager():
    def dropped(h):
        h.to_sparse()
        return h * 2

    assert_trains_like_eager(Then(dropped), [(torch.randn(3, 4),)], steps=2)


def test_an_effect_besides_the_results_is_refused():
    def prints(h):
        torch._higher_order_ops.print("forward")
        return h

    assert refusal(prints) == (
        "forward calls an operator that has an effect besides its results, as torch's print, and a graph has "
        "no order in which such effects come. Put the call into a torch.autograd.Function"
    )
