"""ORTModule and torch.compile(backend="torch2ort") beside each other, and nested."""

from __future__ import annotations

import copy

import pytest
import torch

import torch2ort
from tests.support.comparison import assert_same
from torch2ort.errors import ExportError


def test_a_compiled_ortmodule_is_the_ortmodule() -> None:
    torch.compiler.reset()
    eager = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh())
    model = copy.deepcopy(eager)
    faster, x = torch.compile(torch2ort.ORTModule(model), backend="torch2ort"), torch.randn(2, 4)
    outputs = [faster(x), eager(x)]
    for output in outputs:
        output.sum().backward()
    assert_same(*outputs, "output")
    assert_same(model[0].weight.grad, eager[0].weight.grad, "gradient")
    assert torch2ort.compile_report().graphs == ()


def test_an_ortmodule_of_what_is_compiled_is_refused() -> None:
    compiled = torch.compile(torch.nn.Linear(4, 3), backend="torch2ort")
    with pytest.raises(ExportError, match=r"a result of torch\.compile; wrap the model that was passed to"):
        torch2ort.ORTModule(compiled)


class Branching(torch.nn.Module):
    """Branches on a value."""

    def forward(self, x):
        return x.sin() if x.sum() > 0 else x.cos()


def test_what_an_ortmodule_says_of_torch_compile_is_true() -> None:
    model, x = Branching(), torch.randn(3, requires_grad=True)
    with pytest.raises(
        ExportError, match=r"torch\.compile\(model, backend='torch2ort'\) runs such code unchanged"
    ):
        torch2ort.ORTModule(model)(x)
    for sign in (1, -1):
        given = sign * x.detach().abs()
        assert_same(torch.compile(model, backend="torch2ort")(given), model(given), "output")
