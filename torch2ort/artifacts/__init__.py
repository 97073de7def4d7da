"""Training steps that :func:`torch2ort.export_training` saved, run without torch.

The classes need onnxruntime, numpy and safetensors, and import no torch. They are imported at the first
access, as an export also imports this package, for the names in the files, and needs no onnxruntime.
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
