"""Attributes that forward sets on the model, which dynamo does after each graph, are as in eager PyTorch."""

from __future__ import annotations

import pytest
import torch

from tests.effects.test_effects import BODIES, made, step
from tests.support.comparison import assert_same

FEW = {"appends_to_a_list", "carries_a_hidden_state"}


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.long) for name in BODIES]
)
def test_what_forward_leaves_is_eagers(name: str) -> None:
    torch.compiler.reset()
    eager, model = made(name), made(name)
    model.compile(backend="torch2ort")
    known: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for number in range(2):
        expected, actual = (step(m, number, k) for m, k in zip((eager, model), known, strict=True))
        for part in ("output", "left", "gradients"):
            assert_same(actual[part], expected[part], f"call {number}: {part}")
        assert actual["structure"] == expected["structure"]
        assert actual["requires_grad"] == expected["requires_grad"]
