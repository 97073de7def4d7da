"""Numbers that forward reads out of tensors are those of each call, in its values and its gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torch2ort
from tests.support.functions import Square

pytestmark = pytest.mark.joint("the other engine has numbers in its graphs")
OPTIONS = torch2ort.Options(engine="joint")


class Model(nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.body = body

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return self.body(self.layer(x), n)


def steps(module, calls):
    found = []
    for x, n in calls:
        module.zero_grad()
        x = x.clone().requires_grad_()
        y = module(x, n)
        (y.float() * torch.linspace(0.5, 1.5, y.numel()).view(y.shape)).sum().backward()
        found += [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]
    return found


def compare(body, dtype=torch.float32, n=(2, -3, 5)):
    model = Model(body).to(dtype)
    module = torch2ort.ORTModule(copy.deepcopy(model), options=OPTIONS)
    calls = [(torch.randn(3, 4, dtype=dtype), torch.tensor(number)) for number in n]
    found, expected = steps(module, calls), steps(model, calls)
    assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in expected]
    torch.testing.assert_close(found, expected)


def quantised(h, n):
    scale = h.detach().abs().max().item() / torch.tensor(127.0)
    return Square.apply((h / scale).round() * scale + h)


BODIES = {
    "a scale": lambda h, n: h / h.detach().abs().max().item(),
    "a quantiser": quantised,
    "arithmetic": lambda h, n: h * (2 * h.detach().max().item() + 1.5) - (-h.detach().sum().item()),
    "a clamp": lambda h, n: h.clamp(-0.5, h.detach().std().item()),
    "both ends of a clamp": lambda h, n: h.clamp(-h.detach().std().item(), h.detach().std().item()),
    "a comparison": lambda h, n: torch.where(h > h.detach().mean().item(), h, h * 2),
    "a mask": lambda h, n: h.masked_fill(h > 0.1, h.detach().min().item()),
    "one side of where": lambda h, n: torch.where(h > 0, h, h.detach().min().item()),
    "a fill": lambda h, n: torch.full_like(h, h.detach().max().item()) * h,
    "a fill of given sizes": lambda h, n: torch.full((3, 4), h.detach().max().item()) + h,
    "a subtraction from it": lambda h, n: h.detach().max().item() - h,
    "a factor of a sum": lambda h, n: h.sum() * h.detach().max().item(),
    "an integer": lambda h, n: h * n.item(),
    "an integer as a float": lambda h, n: h * (torch.sym_float(n.item()) * 0.5),
    "integers": lambda h, n: h * ((h.detach() * 3).int() * n.item() + 1),
    "an integer that is compared": lambda h, n: torch.where(h * 4 > n.item(), h, -h),
    "in place": lambda h, n: (h * 1).mul_(h.detach().max().item()),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_step_is_eagers(body):
    compare(body)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("name", ["a scale", "arithmetic", "an integer"])
def test_a_step_in_another_precision_is_eagers(name, dtype):
    compare(BODIES[name], dtype)


REFUSED = {
    "a quotient of numbers": (
        lambda h, n: h * (1.0 / h.detach().abs().max().item()),
        "takes a number that <built-in function truediv> computed of one read out of a tensor",
    ),
    "a sum of integers": (
        lambda h, n: h * (n.item() + 1),
        "takes a number that <built-in function add> computed of one read out of a tensor",
    ),
    "a number in half precision": (
        lambda h, n: h.bfloat16().sum() * h.detach().max().item(),
        "takes a number that is read out of a tensor",
    ),
}


@pytest.mark.parametrize(("body", "what"), REFUSED.values(), ids=REFUSED)
def test_where_no_tensor_can_stand_it_is_refused(body, what):
    message = (
        rf"^\S.* at .*test_read_numbers\.py:\d+, in .* {what}, which the joint engine does not take\. "
        r"Keep it a tensor, as x\.max\(\) without \.item\(\), or train with onnxruntime-training "
        r"\(engine='ort_training'\)$"
    )
    module = torch2ort.ORTModule(Model(body), options=OPTIONS)
    with pytest.raises(torch2ort.UnsupportedOperatorError, match=message):
        module(torch.randn(3, 4), torch.tensor(2))
