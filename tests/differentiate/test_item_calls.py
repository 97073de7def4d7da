"""Numbers that forward reads out of tensors are those of each call, in its values and its gradients."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch2ort
from tests.support.functions import Square
from tests.support.sweeps import sample_cases

OPTIONS = torch2ort.Options()


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


def largest(h):
    return h.detach().abs().max().item()


def quantised(h, n):
    scale = largest(h) / 127
    return Square.apply((h / scale).round() * scale + h)


def written(h, number):
    h[:, 0] = number
    return h


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
    "a quotient": lambda h, n: h * (1 / largest(h)),
    "a power": lambda h, n: h * (largest(h) ** 2 + largest(h) ** 0.5),
    "a remainder": lambda h, n: h * (largest(h) % 0.25),
    "an absolute number": lambda h, n: h * abs(h.detach().min().item()),
    "a whole number below it": lambda h, n: h * math.floor(largest(h) * 10),
    "the larger of two": lambda h, n: h / torch.sym_max(largest(h), 1e-8),
    "one of two": lambda h, n: h * torch.sym_ite(largest(h) > 0.5, 2.0, 3.0),
    "arithmetic of integers": lambda h, n: h * ((n.item() * 7 + 1) // 3 - abs(n.item()) % 4),
    "integers beyond 64 bits on the way": lambda h, n: h * (n.item() * 2**62 // 2**61),
    "a quotient of integers": lambda h, n: h * (n.item() / 3),
    "a quotient of a number and a size": lambda h, n: h * (n.item() / h.shape[0]),
    "how many there are": lambda h, n: h.sum() / (h.detach() < 9).sum().item(),
    "a bool": lambda h, n: torch.where(h > 0, h, (n > 0).item()) * (n > 0).item(),
    "an exponent": lambda h, n: h.abs() ** largest(h) + abs(n.item()) ** h,
    "a slope": lambda h, n: F.leaky_relu(h, largest(h)),
    "a factor of another term": lambda h, n: torch.add(h, h.exp(), alpha=largest(h)),
    "a tensor": lambda h, n: torch.tensor(largest(h)) * h + h.new_full((4,), largest(h)),
    "an index_fill": lambda h, n: h.index_fill(1, torch.tensor([0, 2]), largest(h)),
    "an index_fill in place": lambda h, n: (h * 1).index_fill_(1, torch.tensor([0, 2]), n.item()),
    "a scatter": lambda h, n: h.scatter(1, torch.tensor([[0, 2]] * 3), largest(h)),
    "a column that is written": lambda h, n: written(h * 1, largest(h)),
    "the end of a linspace": lambda h, n: h * torch.linspace(0, largest(h), 4),
    "a bucket": lambda h, n: h * torch.bucketize(largest(h), torch.tensor([0.1, 0.5, 1.0])),
    "a bucket of a number": lambda h, n: h * torch.bucketize(0.4, torch.tensor([0.1, 0.5, 1.0])),
}


@pytest.mark.parametrize("body", sample_cases(BODIES.values(), 2), ids=BODIES)
def test_a_step_is_eagers(body):
    compare(body)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("name", ["a scale", "arithmetic", "an integer", "a factor of a sum", "a slope"])
def test_a_step_in_another_precision_is_eagers(name, dtype):
    compare(BODIES[name], dtype)


RAISING = {
    "a quotient": (lambda h, n: h * (1 / n.item()), ZeroDivisionError),
    "a quotient of floats": (lambda h, n: h * (1.0 / n.double().item()), ZeroDivisionError),
    "a remainder": (lambda h, n: h * (7.5 % n.double().item()), ZeroDivisionError),
    "a power": (lambda h, n: h * n.double().item() ** -1, ZeroDivisionError),
    "a power that is too large": (lambda h, n: h * (n.double().item() + 99) ** 200, OverflowError),
    "an unused quotient": (
        lambda h, n: torch.zeros_like(h / (1 / n.item())) + h,
        ZeroDivisionError,
    ),
    "a size": (lambda h, n: h[:, : 12 // n.item()], ZeroDivisionError),
}


@pytest.mark.parametrize(("body", "kind"), sample_cases(RAISING.values(), 2), ids=RAISING)
def test_where_python_raises_a_step_does(body, kind):
    model = Model(body)
    module = torch2ort.ORTModule(copy.deepcopy(model), options=OPTIONS)
    messages = []
    for run in (model, module):
        with pytest.raises(kind) as raised:
            run(torch.randn(3, 4), torch.tensor(0))
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_a_step_behind_one_in_which_python_raised_is_eagers():
    model = Model(RAISING["a quotient"][0])
    module = torch2ort.ORTModule(copy.deepcopy(model), options=OPTIONS)
    with pytest.raises(ZeroDivisionError):
        module(torch.randn(3, 4), torch.tensor(0))
    calls = [(torch.randn(3, 4), torch.tensor(4))]
    torch.testing.assert_close(steps(module, calls), steps(model, calls))


ELSEWHERE = {
    "an integer of more than 64 bits": (
        lambda h, n: h * (n.item() * 2),
        2**62,
        OverflowError,
        "a number that the model computes from one that it reads out of a tensor is 9223372036854775808, and "
        "a graph holds integers of 64 bits; compute it with floating-point numbers",
    ),
    "a complex number": (
        lambda h, n: h * n.double().item() ** 0.5,
        -4,
        TypeError,
        f"a number that the model computes from one that it reads out of a tensor is {(-4.0) ** 0.5}, of "
        "type complex, and its graph was traced for float; compute it with tensors, as x.max() without "
        ".item()",
    ),
}


@pytest.mark.parametrize(("body", "number", "kind", "message"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_number_that_a_graph_does_not_hold_raises(body, number, kind, message):
    module = torch2ort.ORTModule(Model(body), options=OPTIONS)
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        module(torch.randn(3, 4), torch.tensor(number))


def test_a_floor_division_of_floats_is_refused():
    """torch.export treats it as the floor of a quotient, which is 10 for ``1.0 // 0.1`` instead of 9."""
    module = torch2ort.ORTModule(Model(lambda h, n: h * (largest(h) // 0.1)), options=OPTIONS)
    message = (
        r"^aten\.mul\.Tensor at .*test_item_calls\.py:\d+, in .* takes a number that <function sym_float "
        r".*> computed of one read out of a tensor, which a training graph does not take\. Keep it a tensor, "
        r"as x\.max\(\) without \.item\(\), or put this part of the model into a torch\.autograd\.Function$"
    )
    with pytest.raises(torch2ort.UnsupportedOperatorError, match=message):
        module(torch.randn(3, 4), torch.tensor(2))
