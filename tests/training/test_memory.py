"""What crosses from ONNX Runtime to PyTorch stays as it is, whatever is run or freed afterwards."""

from __future__ import annotations

import copy

import torch

import torch2ort
from tests.comparison import assert_same, assert_trains_like_eager


class Statistics(torch.nn.Module):
    """Its buffer's new value is computed in place, and small tensors of the same size follow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.register_buffer("average", torch.zeros(2))

    def forward(self, x):
        hidden = self.layer(x)
        self.average.copy_(self.average * 0.5 + hidden.detach().mean(0) * 0.5 + x.shape[0] / 7)
        for _ in range(4):
            hidden = torch.relu(torch.tanh(hidden) * hidden.detach() + self.layer.bias * 0.5)
        return hidden


def test_written_buffers_and_detached_values_keep_their_memory():
    batches = [(torch.randn(n, 2),) for n in (3, 5, 4, 6)]
    assert_trains_like_eager(Statistics(), batches, steps=8, lr=0.01)


def test_outputs_outlive_the_backward_and_the_module():
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4), torch.nn.Tanh()
    )
    ort = torch2ort.ORTModule(copy.deepcopy(model))
    xs = [torch.randn(3, 4) for _ in range(10)]
    kept = []
    for x in xs:
        y = ort(x)
        y.sum().backward()
        kept.append(y.detach())
    del ort, y
    junk = [torch.randn(3, 4) for _ in range(200)]
    for x, y in zip(xs, kept, strict=True):
        assert_same(y, model(x).detach(), "output")
    del junk


def test_gradients_do_not_share_memory():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    ort = torch2ort.ORTModule(model)
    ort(torch.randn(3, 4)).sum().backward()
    addresses = [p.grad.data_ptr() for p in ort.parameters()]
    assert len(set(addresses)) == len(addresses)
