"""Operators that run in PyTorch's kernels in other graphs, each alone: a step's results and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import torch2ort
from torch2ort import optim
from torch2ort.artifacts import TrainingSession
from torch2ort.errors import EngineError

OPSETS = [18, pytest.param(21, marks=pytest.mark.long)]


class Table(torch.nn.Module):
    """A parameter times the input, so that a step with learning rate one shows its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([[1.0, 3.0, 3.0, -2.0], [0.5, 3.0, -2.0, -1.0]]))

    def forward(self, x):
        return self.weight * x


def loss(outputs, targets):
    return outputs.max() + 2 * outputs.min() + (outputs * F.one_hot(targets, 4)).sum()


def metrics():
    return {
        "largest": lambda outputs, targets: outputs.max(),
        "smallest class": lambda outputs, targets: targets.min(),
        "largest class in few bits": lambda outputs, targets: targets.to(torch.uint8).max(),
        "largest of one": lambda outputs, targets: outputs[0, 0].max(),
    }


@pytest.fixture(scope="module", params=OPSETS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("step")
    batch = torch.ones(2, 4), torch.tensor([0, 3])
    torch2ort.export_training(
        Table(), batch, loss=loss, metrics=metrics(), optimizer=optim.SGD(lr=1.0), opset=request.param
    ).save(made)
    return made


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(torch.ones(2, 4), id="ties"),
        pytest.param(torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]]), id="one each"),
        pytest.param(torch.tensor([[1.0, torch.nan, 3, 4], [5, 6, torch.nan, 8]]), id="no numbers"),
        pytest.param(torch.tensor([[1.0, torch.inf, 3, 4], [5, 6, torch.inf, 8]]), id="infinity"),
    ],
)
def test_values_and_gradients_are_those_of_torch(folder, x):
    model, targets = Table(), torch.tensor([0, 3])
    wanted = loss(model(x), targets)
    wanted.backward()
    session = TrainingSession(folder)
    found = session.step((x.numpy(), targets.numpy()))
    np.testing.assert_allclose(found["loss"], wanted.item(), rtol=1e-6)
    for name, metric in metrics().items():
        np.testing.assert_array_equal(found[name], metric(model(x), targets).detach().numpy())
    after = (model.weight - model.weight.grad).detach()
    np.testing.assert_allclose(session.parameters()["weight"], after.numpy(), rtol=1e-6)


@pytest.mark.parametrize("classes", [[0, 4], [-1, 2]])
def test_a_class_that_there_is_not_is_refused(folder, classes: list[int]):
    session: Any = TrainingSession(folder)
    for run in (session.step, session.evaluate):
        with pytest.raises(EngineError, match="indices element out of data bounds"):
            run((np.ones((2, 4), np.float32), np.array(classes)))
    np.testing.assert_array_equal(session.parameters()["weight"], Table().weight.detach().numpy())
