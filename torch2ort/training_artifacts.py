"""The result of an export of a training step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx

from torch2ort.artifacts import atomic_write
from torch2ort.artifacts.checkpoint import Arrays, Progress, write_checkpoint
from torch2ort.artifacts.read_training_json import CHECKPOINT, DESCRIPTION, Description, digest


class TrainingArtifacts:
    """A training step as ONNX graphs, with its initial state.

    Attributes:
        models: file name -> graph.
        state: name in a checkpoint -> initial value.
        description: the contents of ``training.json``.
    """

    def __init__(
        self, models: Mapping[str, onnx.ModelProto], state: Mapping[str, np.ndarray], description: Description
    ) -> None:
        self.models = dict(models)
        self.state: Arrays = dict(state)
        self.description = description

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the files of the training step.

        ``train_step.onnx`` computes a complete step; ``training_model.onnx``, ``eval_model.onnx`` and
        ``optimizer_model.onnx`` compute its parts, for accumulated gradients; ``checkpoint.safetensors``
        contains the initial state; ``training.json`` describes the other files.

        Args:
            folder: the folder; it is created if it does not exist, and existing files are replaced.

        Raises:
            OSError: a file cannot be written.
        """
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        hashes = {}
        for name, model in self.models.items():
            content = model.SerializeToString()
            hashes[name] = digest(content)
            atomic_write.write(target / name, content)
        start = Progress(0, 0, self.description.learning_rate)
        description = replace(self.description, files=hashes)
        write_checkpoint(target / CHECKPOINT, self.state, description, start)
        atomic_write.write(target / DESCRIPTION, description.to_json().encode())

    def __repr__(self) -> str:
        count = len(self.description.parameters)
        return f"TrainingArtifacts({count} trained parameters, {', '.join(self.models)})"
