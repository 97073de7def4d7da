"""A small training step that the tests of several files run."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import torch2ort
from torch2ort import optim

Batch = tuple[np.ndarray, np.ndarray]


class Net(torch.nn.Module):
    """With dropout and a running mean, so that a step depends on all that a checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.drop = torch.nn.Dropout(0.25)
        self.norm = torch.nn.BatchNorm1d(4)
        self.last = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.drop(self.norm(torch.relu(self.first(x)))))


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == targets).float().mean()


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    """A model and the folder of its training step, whose batch varies."""
    torch.manual_seed(2)
    model = Net()
    batch = torch.export.Dim("batch", min=2, max=64)
    artifacts = torch2ort.export_training(
        model,
        (torch.randn(6, 3), torch.randint(0, 2, (6,))),
        loss=torch.nn.functional.cross_entropy,
        metrics={"accuracy": accuracy, "outputs": lambda outputs, targets: outputs},
        optimizer=optim.AdamW(lr=1e-2, groups=[{"params": "*.bias", "weight_decay": 0.0}]),
        dynamic_shapes=({0: batch}, {0: batch}),
    )
    folder = tmp_path_factory.mktemp("step")
    artifacts.save(folder)
    return model, folder


@pytest.fixture
def folder(made: tuple[torch.nn.Module, Path], tmp_path: Path) -> Path:
    """A copy of the files that a test may change."""
    return Path(shutil.copytree(made[1], tmp_path / "step"))


@pytest.fixture
def model(made: tuple[torch.nn.Module, Path]) -> torch.nn.Module:
    return made[0]


@pytest.fixture
def batch() -> Batch:
    generator = np.random.default_rng(4)
    return generator.standard_normal((6, 3), np.float32), generator.integers(0, 2, 6)
