"""Runs a training step that :func:`torch2ort.export_training` saved.

It needs onnxruntime, numpy and safetensors, and imports no torch. What an export shares with it, the names in
the files, needs no onnxruntime, so that the classes are imported when they are asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch2ort.artifacts.session import TrainingSession
    from torch2ort.artifacts.training_api import CheckpointState, LinearLRScheduler, Module, Optimizer

__all__ = ["CheckpointState", "LinearLRScheduler", "Module", "Optimizer", "TrainingSession"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    file = "session" if name == "TrainingSession" else "training_api"
    return getattr(importlib.import_module(f"{__name__}.{file}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
