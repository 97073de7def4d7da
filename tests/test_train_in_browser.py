"""The page of examples/train_in_browser trains in headless Chromium as eager PyTorch does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.browser import EXAMPLE, NEEDS_BROWSER, reported

STEPS = 50

pytestmark = NEEDS_BROWSER


@pytest.fixture(scope="module")
def example() -> Any:
    """The module that writes the step."""
    spec = importlib.util.spec_from_file_location("make_step", EXAMPLE / "make_step.py")
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(example: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files, and a step beside them."""
    root = tmp_path_factory.mktemp("site")
    for path in EXAMPLE.iterdir():
        if path.name != "step":
            (root / path.name).symlink_to(path)
    example.write(root / "step")
    return root


def eager_losses(model: torch.nn.Module) -> list[float]:
    """The losses, in eager PyTorch, of the steps of test.html."""
    number = 1

    def draw() -> int:
        nonlocal number
        number = number * 16807 % 2147483647
        return number

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(STEPS):
        x = torch.tensor([draw() / 2147483647 for _ in range(8 * 144)]).reshape(8, 144)
        kinds = torch.tensor([draw() % 3 for _ in range(8)])
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), kinds)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_50_steps_in_chromium_have_the_losses_of_torch(site: Path, example: Any, tmp_path: Path) -> None:
    report = reported(site, "test.html", tmp_path / "profile")
    assert len(report["losses"]) == STEPS
    np.testing.assert_allclose(report["losses"], eager_losses(example.make_model()), rtol=1e-4, atol=1e-5)
