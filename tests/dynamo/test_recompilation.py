"""A change between two calls takes effect through torch.compile where dynamo guards on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.variants.guard_comparison import compiled, verdict
from tests.variants.model_changes import WAYS, Way

FEW = {
    "parameter replaced by one of another size",
    "parameter's data of another size",
    "tensor of an object, written to",
}


def compiled_here(model: torch.nn.Module) -> Any:
    torch.compiler.reset()
    return torch.compile(model, backend="torch2ort")


@pytest.mark.parametrize(
    "way", [way if way.name in FEW else pytest.param(way, marks=pytest.mark.long) for way in WAYS], ids=str
)
def test_the_next_call_is_that_of_dynamos_own_backend(way: Way) -> None:
    assert verdict(way, compiled_here) == verdict(way, compiled)
