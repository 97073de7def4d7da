"""A conv + BatchNorm net trains as in eager PyTorch, running statistics included."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.support.comparison import assert_trains_like_eager
from tests.support.sweeps import sample_cases


class ConvNet(torch.nn.Module):
    def __init__(self, **settings) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm = torch.nn.BatchNorm2d(6, **settings)
        self.deep = torch.nn.Conv2d(6, 8, 3, stride=2, bias=False)
        self.deep_norm = torch.nn.BatchNorm2d(8, **settings)
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x):
        hidden = torch.relu(self.norm(self.conv(x)))
        hidden = torch.nn.functional.max_pool2d(hidden, 2)
        hidden = torch.relu(self.deep_norm(self.deep(hidden)))
        return self.head(hidden.mean((2, 3)))


@pytest.mark.parametrize(
    ("training", "optimizer"),
    sample_cases(itertools.product((True, False), (torch.optim.SGD, torch.optim.AdamW)), 3),
)
def test_conv_net(training, optimizer):
    model = ConvNet().train(training)
    assert_trains_like_eager(model, [(torch.randn(4, 3, 12, 12, requires_grad=True),)], optimizer, lr=0.01)


@pytest.mark.parametrize("settings", [{"momentum": None}, {"track_running_stats": False}, {"affine": False}])
def test_kinds_of_batch_norm(settings):
    assert_trains_like_eager(ConvNet(**settings), [(torch.randn(4, 3, 12, 12),)], lr=0.01, steps=5)


def test_train_and_eval_in_turns_continue_the_same_statistics():
    model = ConvNet()
    module = assert_trains_like_eager(model, [(torch.randn(4, 3, 12, 12),)], lr=0.01, steps=3)
    x = torch.randn(4, 3, 12, 12)
    module.eval()
    model.eval()
    torch.testing.assert_close(module(x), model(x), rtol=1e-4, atol=1e-5)
