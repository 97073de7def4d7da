"""Runs a training step that :func:`torch2ort.export_training` saved.

It needs onnxruntime, numpy and safetensors, and imports no torch.
"""

from torch2ort.artifacts.session import TrainingSession

__all__ = ["TrainingSession"]
