"""A graph for varying sizes gives eager PyTorch's results, or names the sizes that it does not support."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F

import torch2ort
from tests.support.comparison import assert_same


class Model(torch.nn.Module):
    def __init__(self, body: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._body(x)


# torch decomposes these into operators that are correct for the sample's size alone.
POOLS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "average, one axis": (lambda x: F.adaptive_avg_pool1d(x, 3), 1),
    "average, two axes": (lambda x: F.adaptive_avg_pool2d(x, 2), 2),
    "average, to one": (lambda x: F.adaptive_avg_pool2d(x, 1), 2),
    "average, three axes": (lambda x: F.adaptive_avg_pool3d(x, (1, 2, 2)), 3),
    "largest, one axis": (lambda x: F.adaptive_max_pool1d(x, 3), 1),
    "largest, two axes": (lambda x: F.adaptive_max_pool2d(x, (2, 3)), 2),
    "largest, three axes": (lambda x: F.adaptive_max_pool3d(x, 2), 3),
}


def exported(model: torch.nn.Module, sample: torch.Tensor, axes: Sequence[int]) -> torch2ort.ExportedModel:
    names = {axis: torch.export.Dim(f"size_{axis}", min=2, max=64) for axis in axes}
    return torch2ort.export(model, sample, dynamic_shapes=(names,))


@pytest.mark.parametrize(("pool", "rank"), POOLS.values(), ids=POOLS)
def test_an_adaptive_pool_takes_every_size(pool: Callable[[torch.Tensor], torch.Tensor], rank: int) -> None:
    model = Model(pool)
    graph = exported(model, torch.randn(2, 3, *[8] * rank), range(2, 2 + rank))
    for sizes in ([9, 7, 5], [4, 4, 4], [33, 17, 6]):
        x = torch.randn(2, 3, *sizes[:rank])
        assert_same(graph(x), model(x), f"of {sizes[:rank]}")


def test_an_adaptive_pool_over_fixed_sizes_needs_no_kernel_of_torchs() -> None:
    graph = exported(Model(POOLS["average, two axes"][0]), torch.randn(2, 3, 8, 8), [0])
    assert not graph.python_ops
