"""Exports and runs leave no descriptor, thread, handler, filter or temporary file behind."""

from __future__ import annotations

import gc
import logging
import os
import tempfile
import threading
import warnings

import pytest
import torch

import torch2ort
from tests.support.functions import Square

EXPORTS = 50


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return Square.apply(x * self.scale)


def _standing():
    """The resources of the process that an export could leak."""
    gc.collect()
    names = list(logging.root.manager.loggerDict)
    loggers = [logging.getLogger(), *(logging.getLogger(name) for name in names)]
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "handlers": sum(len(logger.handlers) for logger in loggers),
        "filters": sum(len(each.filters) for logger in loggers for each in (logger, *logger.handlers)),
        "last resort": len(logging.lastResort.filters),
        "warnings": len(warnings.filters),
    }


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are counted in /proc")
def test_exports_leave_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    torch2ort.export(Model(), torch.randn(2))  # imports and registrations that happen once
    before = _standing()
    for size in range(EXPORTS):
        torch2ort.export(Model(), torch.randn(1 + size))
    assert _standing() == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are counted in /proc")
def test_a_failed_export_leaves_nothing_behind(tmp_path, monkeypatch):
    class Failing(Model):
        def forward(self, x):
            raise ValueError("mine")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    torch2ort.export(Model(), torch.randn(2))
    before = _standing()
    for _ in range(5):
        with pytest.raises(ValueError, match="mine"):
            torch2ort.export(Failing(), torch.randn(2))
    assert _standing() == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are counted in /proc")
def test_training_and_profiling_leave_nothing_behind(tmp_path, monkeypatch):
    def step():
        module, x = torch2ort.ORTModule(Model()), torch.randn(2)
        module(x).sum().backward()
        with module.profile(1):
            module(x).sum().backward()

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    step()
    before = _standing()
    for _ in range(3):
        step()
    assert _standing() == before
    assert list(tmp_path.iterdir()) == []
