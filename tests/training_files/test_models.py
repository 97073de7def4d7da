"""Whole models, trained for 50 steps by their files and by eager PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.training_files.eager_comparison import assert_trains_alike
from torch2ort import optim


def images(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 2, 8, 8, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def tokens(step: int, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 11, (4, 5), generator=generator), torch.randint(
        0, classes, (4,), generator=generator
    )


def vectors(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 5, generator=generator), torch.randint(0, 3, (6,), generator=generator)


def test_an_mlp(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    assert_trains_alike(
        model,
        vectors,
        tmp_path,
        loss=F.cross_entropy,
        optimizer=optim.AdamW(lr=1e-2),
        eager_optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    )


def test_an_mlp_in_float64(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.SiLU(), torch.nn.Linear(4, 3)).double()

    def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = vectors(step)
        return x.double(), y

    session = assert_trains_alike(
        model,
        batches,
        tmp_path,
        loss=F.cross_entropy,
        optimizer=optim.SGD(lr=0.25),
        eager_optimizer=lambda p: torch.optim.SGD(p, lr=0.25),
        rtol=1e-12,
        atol=1e-12,
    )
    assert {value.dtype for value in session.parameters().values()} == {np.dtype(np.float64)}


def test_a_convolutional_net_whose_running_statistics_are_state(tmp_path):
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3, padding=1),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(4, 6, 3, padding=1, groups=2, bias=False),
        torch.nn.BatchNorm2d(6),
        torch.nn.GELU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(6, 3),
    )
    session = assert_trains_alike(
        model,
        images,
        tmp_path,
        loss=F.cross_entropy,
        optimizer=optim.SGD(lr=0.05, momentum=0.9, weight_decay=1e-3),
        eager_optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    )
    assert set(session.description.buffers) == {
        f"{i}.{name}" for i in (1, 5) for name in ("running_mean", "running_var", "num_batches_tracked")
    }


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(11, 4)
        self.lstm = torch.nn.LSTM(4, 5, batch_first=True)
        self.out = torch.nn.Linear(5, 3)

    def forward(self, tokens):
        return self.out(self.lstm(self.table(tokens))[0][:, -1])


@pytest.mark.long
def test_an_lstm(tmp_path):
    assert_trains_alike(
        Recurrent(),
        tokens,
        tmp_path,
        loss=F.cross_entropy,
        optimizer=optim.Adam(lr=1e-2),
        eager_optimizer=lambda p: torch.optim.Adam(p, lr=1e-2),
    )
