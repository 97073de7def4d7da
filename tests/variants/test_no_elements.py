"""An empty batch gives eager PyTorch's shapes, values and gradients, as the first batch and later."""

from __future__ import annotations

import pytest
import torch

import torch2ort
from tests.support.comparison import assert_trains_like_eager, tensors_of
from tests.support.sweeps import sample_cases


class Around(torch.nn.Module):
    def __init__(self, call) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self._call = call

    def forward(self, x):
        return self._call(self.layer(x))


def copied(h):
    y = h * 2
    y.copy_(h)
    y[:, 2:] = h[:, :2]
    return y


CALLS = {
    "sum": lambda h: h.sum(-1),
    "mean of two axes": lambda h: h.view(-1, 2, 2).mean((-1, -2)),
    "amax": lambda h: h.amax(-1),
    "max": lambda h: h.max(-1).values,
    "prod": lambda h: h.prod(-1),
    "norm": lambda h: torch.linalg.vector_norm(h, dim=-1),
    "logsumexp": lambda h: h.logsumexp(-1),
    "argmax": lambda h: (h, h.argmax(-1), h.argmin(-1, keepdim=True)),
    "group norm": lambda h: torch.nn.functional.group_norm(h, 2),
    "repeat_interleave": lambda h: h[:, ::2].repeat_interleave(2, 1) + h.repeat_interleave(2, 0)[::2],
    "copy": copied,
    "sort": lambda h: h.sort(-1).values,
    "topk": lambda h: h.topk(3, -1).values,
    "argsort": lambda h: (h, h.argsort(-1)),
    "a derivative that is zero": lambda h: h.sign() + h,
}


# Each call starts without elements or has none later; the other one is left to `make test-long`.
SIZES = ((0, 3), (3, 0, 2))
TRAININGS = [
    case
    for i, name in enumerate(CALLS)
    for case in sample_cases([(name, sizes) for sizes in SIZES], 2, i % 2)
]


@pytest.mark.parametrize(("name", "sizes"), TRAININGS, ids=str)
def test_training(name, sizes):
    def loss(output):
        return sum(
            t.sum() for t in (output if isinstance(output, tuple) else (output,)) if t.is_floating_point()
        )

    batches = [(torch.randn(rows, 4),) for rows in sizes]
    assert_trains_like_eager(Around(CALLS[name]), batches, steps=len(sizes), loss=loss)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_inference(call):
    model, x = Around(call).requires_grad_(False), torch.randn(0, 4)
    torch.testing.assert_close(torch2ort.export(model, x)(x), model(x))


SORTS = {
    "sort": lambda h: h.sort(-1).values,
    "sort of columns": lambda h: h.sort(0),
    "topk": lambda h: h.topk(3, -1),
    "topk of the smallest": lambda h: h.topk(2, 1, largest=False, sorted=True).indices,
    "argsort": lambda h: h.argsort(0, descending=True),
}


@pytest.mark.parametrize("call", SORTS.values(), ids=SORTS)
def test_a_graph_for_sizes_that_vary_sorts_nothing(call):
    model = Around(call).requires_grad_(False)
    rows = torch.export.Dim("rows", min=0)
    exported = torch2ort.export(model, torch.randn(3, 4), dynamic_shapes=({0: rows},))
    for count in (0, 5, 1):
        x = torch.randn(count, 4)
        for actual, expected in zip(tensors_of(exported(x)), tensors_of(model(x)), strict=True):
            torch.testing.assert_close(actual, expected)


MEANS = {
    "of all": lambda h: h.mean(),
    "of the rows": lambda h: h.mean(0, keepdim=True),
    "of rows and columns": lambda h: h.view(-1, 2, 2).mean((0, 2)),
    "as double": lambda h: h.mean(0, dtype=torch.float64),
}


@pytest.mark.parametrize("call", MEANS.values(), ids=MEANS)
@pytest.mark.parametrize("varying", [False, True])
def test_the_mean_of_nothing_is_not_a_number(call, varying):
    model = Around(call).requires_grad_(False)
    rows = torch.export.Dim("rows", min=0)
    sample = torch.randn(3 if varying else 0, 4)
    exported = torch2ort.export(model, sample, dynamic_shapes=({0: rows},) if varying else None)
    for count in (0, 5, 1) if varying else (0,):
        x = torch.randn(count, 4)
        torch.testing.assert_close(exported(x), model(x), equal_nan=True)
