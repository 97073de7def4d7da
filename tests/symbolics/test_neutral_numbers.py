"""Numbers near 0 and 1 count, on every road, down to the last bit."""

import pytest
import torch

import torch2ort

X = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]])


def _exported(model):
    return torch2ort.export(model, X)


def _wrapped(model):
    return torch2ort.ORTModule(model)


def _compiled(model):
    return torch.compile(model, backend="torch2ort")


class _Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        h = x * self.weight
        return h / (h.sum(1, keepdim=True) + 1e-8), torch.log(h + 1e-9), h * 1.000005, h / 1.000005, h - 1e-9


@pytest.mark.parametrize("road", [_exported, _wrapped, _compiled])
def test_small_numbers_are_not_dropped(road):
    model = _Small()
    expected, found = model(X), road(model)(X)
    torch.testing.assert_close(found, expected, rtol=2e-7, atol=0)
