"""Memory layouts of inputs: a graph serves those for which eager PyTorch would compute the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch2ort
from tests.support.comparison import assert_same


class Lies(nn.Module):
    """Queries the memory layout of its input."""

    def __init__(self, compute: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.compute = compute

    def forward(self, x):
        return self.scale * self.compute(x)


@pytest.mark.parametrize(
    ("compute", "dims"),
    [
        (lambda x: x * (2 if x.is_contiguous() else 3), 2),
        (lambda x: x * x.stride(0), 2),
        (lambda x: x + (x.storage_offset() > 0), 2),
        (lambda x: x if x.is_contiguous(memory_format=torch.channels_last) else 3 * x, 4),
    ],
    ids=["is_contiguous", "stride", "storage_offset", "channels_last"],
)
def test_how_an_input_lies_in_memory_counts_where_forward_asks(compute: Any, dims: int):
    model = Lies(compute)
    wrapped = torch2ort.ORTModule(model)
    x = torch.randn(20, 4)[16:].t() if dims == 2 else torch.randn(2, 3, 4, 4)
    other = x.contiguous() if dims == 2 else x.to(memory_format=torch.channels_last)
    graphs = []
    for given in (x, other, x):
        assert_same(wrapped(given), model(given), "result")
        graphs.append(wrapped.exported)
    assert graphs[0] is graphs[2]
    assert graphs[0] is not graphs[1]


def reshaped(x):
    x.detach().reshape(-1).add_(1)
    return x * 1


def made_contiguous(x):
    x.detach().contiguous().mul_(2)
    return x * 1


def joined(x):
    copy = x * 1
    copy.flatten().add_(1)
    return copy * 1


TRANSPOSED = torch.linspace(-1, 1, 12).reshape(4, 3).t()
CONTIGUOUS = torch.linspace(-1, 1, 12).reshape(3, 4)
ORDERS = {
    "contiguous first": (CONTIGUOUS, TRANSPOSED, CONTIGUOUS),
    "transposed first": (TRANSPOSED, CONTIGUOUS, TRANSPOSED),
    "with gaps": (CONTIGUOUS, torch.linspace(-1, 1, 24).reshape(3, 8)[:, ::2], TRANSPOSED),
}


def assert_each_is_eagers(compute: Callable[[torch.Tensor], torch.Tensor], inputs: Any) -> None:
    """Compare the results of one ORTModule, and its writes to the inputs, with eager PyTorch."""
    model = Lies(compute)
    wrapped = torch2ort.ORTModule(model)
    for x in inputs:
        given = [copy.deepcopy(x) for _ in range(2)]
        results = []
        for module, own in zip((wrapped, model), given, strict=True):
            torch.manual_seed(3)
            results.append(module(own))
        assert_same(*results, "result")
        assert_same(*given, "input after the call")


@pytest.mark.parametrize("inputs", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("compute", [reshaped, made_contiguous, joined])
def test_what_is_written_is_a_view_or_a_copy_as_in_eager(compute: Any, inputs: Any):
    assert_each_is_eagers(compute, inputs)


@pytest.mark.parametrize("inputs", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize(
    "compute", [F.dropout, lambda x: F.dropout(x * 2, inplace=True)], ids=["new", "in place"]
)
def test_an_input_is_dropped_in_the_order_in_which_it_lies(compute: Any, inputs: Any):
    assert_each_is_eagers(compute, inputs)


@pytest.mark.parametrize(
    "compute",
    [lambda x: x * 2, lambda x: x.view(-1), lambda x: F.avg_pool2d(x[None], 2).view(-1)],
    ids=["neither", "view", "an attribute named stride"],
)
def test_where_an_input_begins_in_memory_does_not_count_else(compute: Any):
    model = Lies(compute)
    wrapped = torch2ort.ORTModule(model)
    data = torch.randn(12, 4)
    graphs = set()
    for begin in range(0, 12, 3):
        assert_same(wrapped(data[begin : begin + 3]), model(data[begin : begin + 3]), "result")
        graphs.add(wrapped.exported)
    assert len(graphs) == 1


def test_reading_by_strides_what_has_gaps_is_refused():
    model = Lies(lambda x: x.as_strided((2, 2), (1, 2)))
    wrapped = torch2ort.ORTModule(model)
    x = torch.randn(4, 4)
    assert_same(wrapped(x), model(x), "result")
    assert_same(wrapped(x.t()), model(x.t()), "result of the transposed input")
    line = Lies.forward.__code__.co_firstlineno + 1
    with pytest.raises(torch2ort.UnsupportedOperatorError) as caught:
        wrapped(torch.randn(4, 8)[:, ::2])
    assert str(caught.value) == (
        f"aten.as_strided.default at {__file__}:{line}, in forward: return self.scale * self.compute(x) "
        "reads the memory of a tensor with strides (8, 2) and offset 0, and every value of a graph is "
        "contiguous. Take as_strided of tensor.contiguous(), or index the tensor"
    )


@pytest.mark.parametrize(
    ("compute", "other"),
    [
        (lambda x: x + x.storage_offset(), torch.ones(9, 4)[4:]),
        (lambda x: x * x.stride(0), torch.ones(5, 8)[:, ::2]),
        (joined, torch.ones(5, 8)[:, ::2]),
        (F.dropout, torch.ones(4, 5).t()),
    ],
    ids=["offset", "strides", "reshaped", "dropped"],
)
def test_a_graph_out_of_the_cache_serves_inputs_that_lie_like_its_own(
    compute: Any, other: Any, tmp_path: Path
):
    model = Lies(compute)
    options = torch2ort.Options(cache_dir=tmp_path)
    for x in (torch.ones(3, 4), torch.ones(4, 4), torch.ones(5, 4), other):
        torch.manual_seed(3)
        result = torch2ort.ORTModule(model, options=options)(x)
        torch.manual_seed(3)
        assert_same(result, model(x), "result")
