"""Environment variables of onnxruntime's ORTModule are reported once, and the page names each."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import torch2ort
from torch2ort.support import legacy_env_vars

PAGE = Path(__file__).parent.parent / "docs" / "coming_from_ortmodule.md"


def test_a_variable_that_is_set_warns_once(monkeypatch):
    monkeypatch.setattr(legacy_env_vars, "_warned", set())
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", "/somewhere")
    with pytest.warns(torch2ort.Torch2OrtWarning) as caught:
        torch2ort.ORTModule(torch.nn.Linear(2, 2))
    assert [str(warning.message) for warning in caught] == [
        "the environment variable ORTMODULE_CACHE_DIR is of onnxruntime's ORTModule and has no effect on "
        "torch2ort: set TORCH2ORT_CACHE_DIR. See docs/coming_from_ortmodule.md"
    ]
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch2ort.ORTModule(torch.nn.Linear(2, 2))


def test_the_page_names_every_variable():
    page = PAGE.read_text()
    assert [name for name in legacy_env_vars.INSTEAD if f"`{name}`" not in page] == []
