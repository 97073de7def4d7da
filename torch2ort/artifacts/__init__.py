"""Runs a training step that :func:`torch2ort.export_training` saved.

It needs onnxruntime, numpy and safetensors, and imports no torch.
"""

from torch2ort.artifacts.session import TrainingSession
from torch2ort.artifacts.training_api import CheckpointState, LinearLRScheduler, Module, Optimizer

__all__ = ["CheckpointState", "LinearLRScheduler", "Module", "Optimizer", "TrainingSession"]
