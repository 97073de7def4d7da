"""Models under torch.autocast through torch.compile: types, values and gradients are eager's."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.comparison import assert_same
from tests.support.sweeps import sample_cases

NORMS = {
    "layer": (nn.Linear(4, 8), nn.LayerNorm(8)),
    "layer without parameters": (nn.Linear(4, 8), nn.LayerNorm(8, elementwise_affine=False)),
    "group": (nn.Linear(4, 8), nn.GroupNorm(2, 8)),
    "batch": (nn.Linear(4, 8), nn.BatchNorm1d(8)),
    "batch in evaluation": (nn.Linear(4, 8), nn.BatchNorm1d(8).eval()),
    "batch without statistics": (nn.Linear(4, 8), nn.BatchNorm1d(8, track_running_stats=False)),
    "instance": (nn.Linear(4, 8), nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, affine=True)),
    "root mean square": (nn.Linear(4, 8), nn.RMSNorm(8)),
}
# Nodes call PyTorch's kernels here; under autocast these compute in float32.
WHOLE = {
    "prod of a dimension": lambda x: x.prod(-1),
    "prod": lambda x: x.prod(),
    "multi_margin_loss": lambda x: F.multi_margin_loss(x, torch.tensor([1, 0, 3])),
    "inv": lambda x: torch.linalg.inv(x[:, :4].reshape(3, 2, 2) + 3 * torch.eye(2)),
}


class Whole(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 8), function

    def forward(self, x):
        return self.function(self.linear(x))


def results(model, module, dtype):
    with torch.autocast("cpu", dtype):
        output = module(torch.linspace(-1, 1, 12).view(3, 4))
    (output.float() * torch.arange(output.numel()).view(output.shape).cos()).sum().backward()
    return output, [p.grad for p in model.parameters()], [*model.buffers()]


def assert_like_eager(model, dtype) -> None:
    torch.compiler.reset()
    twin = copy.deepcopy(model)
    expected = results(twin, twin, dtype)
    actual = results(model, torch.compile(model, backend="torch2ort", fullgraph=True), dtype)
    assert_same(actual, expected, "output, gradients and statistics")


@pytest.mark.parametrize(
    ("name", "dtype"), sample_cases(itertools.product(NORMS, (torch.bfloat16, torch.float16)), 3)
)
def test_a_norm_has_statistics_of_eagers_type(name: str, dtype: torch.dtype) -> None:
    assert_like_eager(nn.Sequential(*copy.deepcopy(NORMS[name])), dtype)


def test_a_norm_in_inference_has_eagers_type() -> None:
    model = nn.Sequential(*copy.deepcopy(NORMS["layer"]))
    faster = torch.compile(model, backend="torch2ort", fullgraph=True)
    x = torch.randn(3, 4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert_same(faster(x), model(x), "output")


@pytest.mark.parametrize("name", WHOLE)
def test_a_call_of_a_kernel_gets_autocasts_casts(name: str) -> None:
    assert_like_eager(Whole(WHOLE[name]), torch.bfloat16)
