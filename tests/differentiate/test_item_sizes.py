"""Numbers that forward reads out of tensors and uses as sizes or positions are those of each call."""

from __future__ import annotations

import copy

import pytest
import torch

import torch2ort
from tests.differentiate.test_item_calls import OPTIONS, Model, steps
from tests.support.functions import Square
from tests.support.sweeps import sample_cases
from torch2ort.training import plan_builder


def compare(body, numbers) -> torch2ort.ORTModule:
    """Compare steps on these numbers by eager PyTorch and by ORTModule."""
    model = Model(body)
    module = torch2ort.ORTModule(copy.deepcopy(model))
    calls = [(torch.randn(3, 4), torch.tensor(number)) for number in numbers]
    torch.testing.assert_close(steps(module, calls), steps(model, calls))
    return module


def within(h, n):
    """Return the number, after the model has checked that it is between 0 and 4."""
    number = n.item()
    torch._check(number >= 0)
    torch._check(number <= 4)
    return number


def in_two(h, n):
    first, second = h.split([within(h, n), 4 - within(h, n)], 1)
    return torch.stack([first.sum(), second.square().sum()])


def in_parts(h, n):
    return torch.split(h.flatten(), torch.stack([n, 12 - n]).tolist())


def in_a_list(h, n):
    return torch.stack([part.sum() * (i + 1) for i, part in enumerate(in_parts(h, n))])


ANY = {
    "the end of a slice": lambda h, n: h[:, : n.item()],
    "the start of a slice": lambda h, n: h[:, n.item() :],
    "a sum of it": lambda h, n: h[:, n.item() :].sum(1),
    "a Function of it": lambda h, n: Square.apply(h[:, : n.item()]).sum(1),
    "a number of the number": lambda h, n: h[:, : 2 * n.item() - 3],
    "a factor, too": lambda h, n: h[:, : n.item()] * n.item(),
    "a number of int32": lambda h, n: h[:, : n.to(torch.int32).item()],
    "a roll": lambda h, n: h.roll(n.item(), 1),
    "how many rows are positive": lambda h, n: h[: (h.detach().sum(1) > 0).sum().item()],
}
WITHIN = {
    "a slice": lambda h, n: h[:, : within(h, n)],
    "narrow": lambda h, n: h.narrow(1, 0, within(h, n)),
    "arange": lambda h, n: h.sum() * torch.arange(within(h, n)).float(),
    "zeros": lambda h, n: torch.cat([h, torch.zeros(3, within(h, n))], 1),
    "a fill": lambda h, n: torch.cat([h, torch.full((3, within(h, n)), h.detach().max().item())], 1),
    "expand": lambda h, n: h[None].expand(within(h, n), -1, -1),
    "repeat_interleave": lambda h, n: h.repeat_interleave(within(h, n), 0),
    "the number of the largest": lambda h, n: h.topk(within(h, n), 1)[0],
    "a mean": lambda h, n: h[:, : within(h, n)].sum(1) / n.item(),
    "softmax": lambda h, n: h[:, : within(h, n)].softmax(1),
    "a Function": lambda h, n: Square.apply(h.narrow(1, 0, within(h, n))),
    "a Function beside it": lambda h, n: Square.apply(torch.cat([h, torch.zeros(3, within(h, n))], 1)).exp(),
    "both parts": lambda h, n: torch.cat([h[:, : within(h, n)] * 2, h[:, within(h, n) :]], 1),
    "two reads": lambda h, n: torch.zeros(within(h, n)) + h.sum(0)[: within(h, n)],
    "two parts": in_two,
    "a list": in_a_list,
    "parts of a list": lambda h, n: torch.cat([part.softmax(0) for part in in_parts(h, n)]),
    "Functions of parts": lambda h, n: torch.cat([Square.apply(part) for part in in_parts(h, n)]),
    "a tensor of places": lambda h, n: torch.cat(
        [part.exp() * (i + 1) for i, part in enumerate(h.flatten().tensor_split(torch.stack([n, n + 3])))]
    ),
}


@pytest.mark.parametrize("body", sample_cases(ANY.values(), 2), ids=ANY)
def test_a_number_that_may_be_any_is_that_of_each_call(body):
    compare(body, (2, 3, -1, 0, 9, -7))


@pytest.mark.parametrize("body", sample_cases(WITHIN.values(), 2), ids=WITHIN)
def test_a_number_within_bounds_is_that_of_each_call(body):
    compare(body, (2, 3, 1, 4))


@pytest.mark.parametrize("name", ["a slice", "zeros", "a list"])
def test_a_number_that_leaves_nothing_is_taken(name):
    compare(WITHIN[name], (2, 0, 3))


@pytest.mark.parametrize("name", ["a slice", "arange", "expand"])
@pytest.mark.parametrize("number", sample_cases([-1, 5], 2, start=1))
def test_a_number_outside_of_its_bounds_raises(name, number):
    module = compare(WITHIN[name], (2,))
    with pytest.raises(
        RuntimeError, match=r"^a condition of the model does not hold for the number that is "
    ):
        module(torch.randn(3, 4), torch.tensor(number))


def test_what_was_read_is_not_read_again_in_backward():
    model = Model(WITHIN["a mean"])
    module = torch2ort.ORTModule(copy.deepcopy(model), options=OPTIONS)
    x = torch.randn(3, 4)
    for called in (model, module):
        n = torch.tensor(2)
        y = called(x, n)
        n.fill_(3)
        y.sum().backward()
    assert torch.equal(module.layer.weight.grad, model.layer.weight.grad)


@pytest.mark.parametrize("number", [2, -1])
def test_a_process_with_a_cache_traces_it_once(tmp_path, monkeypatch, number):
    monkeypatch.setenv("TORCH2ORT_CACHE_DIR", str(tmp_path / "cache"))
    body = ANY["a Function of it"]
    with torch.no_grad():
        torch2ort.ORTModule(Model(body), options=OPTIONS)(torch.randn(3, 4), torch.tensor(3))
    assert not compare(body, (3,)).exported.cache.hit
    monkeypatch.setattr(torch.export, "export", None)
    monkeypatch.setattr(plan_builder, "trace_joint", None)
    assert compare(body, (number, 3)).exported.cache.hit


def test_two_numbers_that_meet_have_to_be_one():
    module = compare(lambda h, n: torch.zeros(3, within(h, n)) + h[:, : (n * 0 + 2).item()], (2, 2))
    with pytest.raises((RuntimeError, torch2ort.EngineError)):
        module(torch.randn(3, 4), torch.tensor(3))


REFUSED = {
    "a product over it": (
        lambda h, n: h[:, : within(h, n)] @ h[:, : within(h, n)].T,
        r"PyTorch's autograd does not differentiate the program that torch\.export traced \(Could not guard "
        r"on data-dependent expression Eq\(u\d+, 4\) \(unhinted: Eq\(u\d+, 4\)\)\.  "
        r"\(Size-like symbols: u\d+\)\)\. Put the part of the model that it names into a "
        r"torch\.autograd\.Function",
    ),
}


@pytest.mark.parametrize(("body", "message"), REFUSED.values(), ids=REFUSED)
def test_what_no_graph_stands_for_is_refused(body, message):
    module = torch2ort.ORTModule(Model(body), options=OPTIONS)
    with pytest.raises(torch2ort.UnsupportedOperatorError, match=f"^{message}$"):
        module(torch.randn(3, 4), torch.tensor(2))
