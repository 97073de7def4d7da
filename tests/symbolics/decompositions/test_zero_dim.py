"""Tensors without axes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import torch2ort
from tests.ops.snippets import TORCH_2_11
from tests.support.comparison import assert_same, assert_trains_like_eager
from tests.support.sweeps import sample_cases

CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flip": lambda x: x.flip(0) * 2,
    "flip, from the end": lambda x: x.flip(-1) * 2,
    "flip of no axis": lambda x: x.flip([]) * 2,
    "bucketize": lambda x: x * torch.bucketize(x.detach(), torch.tensor([0.1, 0.4, 1.5])),
    "tile": lambda x: x.tile(()) * 2,
    "mean": lambda x: x.mean(0) * 2,
    "prod": lambda x: x.prod(-1) * 2,
    "amax": lambda x: x.amax(0) * 2,
    "amin": lambda x: x.amin(-1) * 2,
    "any": lambda x: (x > 0).any(0) * x,
    "all": lambda x: (x > 0).all(-1) * x,
    "topk": lambda x: x.topk(1, 0)[0] + x.topk(1)[1],
    "vector_norm": lambda x: torch.linalg.vector_norm(x, 3, dim=0),
    "cosine_similarity": lambda x: torch.cosine_similarity(x, x * 2, dim=0),
}
if not TORCH_2_11:  # torch 2.11 has no derivative of aminmax
    CASES["aminmax"] = lambda x: torch.cat([end.reshape(1) for end in x.aminmax(dim=0)])
    CASES["aminmax of every axis"] = lambda x: torch.cat([end.reshape(1) for end in x.aminmax()])


class Scaled(torch.nn.Module):
    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self._call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._call(x * self.scale)


@pytest.mark.parametrize("call", sample_cases(CASES.values(), 2), ids=CASES)
def test_a_number_is_eagers(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model, x = Scaled(call), torch.tensor(0.7)
    assert_same(torch2ort.export(model, x)(x), model(x), "the number")
    assert_trains_like_eager(model, [(x,)], steps=1)
