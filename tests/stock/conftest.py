"""Fixtures that the tests of the operator library share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torch2ort
from tests.stock.models import Squares


@pytest.fixture
def saved(tmp_path) -> Path:
    """A file with one call of Square."""
    torch.manual_seed(1)
    path = tmp_path / "model.onnx"
    torch2ort.export(Squares().eval(), torch.ones(2, 4)).save(path)
    return path
