"""Parts of a split whose sizes are computed in a run have those sizes in every run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import torch2ort


class Experts(torch.nn.Module):
    """Each row is passed to the expert of its index; rows are sorted by expert."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x, numbers):
        counts = F.one_hot(numbers, 3).sum(0).tolist()
        parts = x.split(counts, 0)
        return torch.cat([F.linear(part, self.weights[i]) for i, part in enumerate(parts)])


NUMBERS = ([0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 2], [2] * 6, [0, 0, 0, 0, 0, 1])


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    model, sample = Experts(), (torch.randn(6, 4), torch.tensor(NUMBERS[0]))
    return model, torch2ort.ORTModule(model), torch2ort.export(model, sample)


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
def test_an_export_splits_as_eager_does(models, numbers):
    model, _, exported = models
    x, k = torch.randn(6, 4), torch.tensor(numbers)
    torch.testing.assert_close(exported(x, k), model(x, k))


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
def test_parts_train_as_in_eager_also_those_without_rows(models, numbers):
    model, wrapped, _ = models
    x, k = torch.randn(6, 4, requires_grad=True), torch.tensor(numbers)
    expected, found = (
        torch.autograd.grad(m(x, k).square().sum(), [x, model.weights]) for m in (model, wrapped)
    )
    torch.testing.assert_close(found, expected)


def test_the_graph_says_of_no_part_how_large_it_is(models):
    values = {v.name: v.type.tensor_type.shape.dim for v in models[2].proto.graph.value_info}
    (split,) = (node for node in models[2].proto.graph.node if node.op_type == "Split")
    assert len({values[part][0].dim_param for part in split.output}) == 3
