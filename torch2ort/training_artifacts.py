"""What an export of a training step gives."""

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
    """A training step as ONNX graphs, with the state that it starts from.

    Attributes:
        models: file name -> graph.
        state: name in a checkpoint -> first value.
        description: what ``training.json`` says.
    """

    def __init__(
        self, models: Mapping[str, onnx.ModelProto], state: Mapping[str, np.ndarray], description: Description
    ) -> None:
        self.models = dict(models)
        self.state: Arrays = dict(state)
        self.description = description

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the files of the training step.

        ``train_step.onnx`` does a whole step; ``training_model.onnx``, ``eval_model.onnx`` and
        ``optimizer_model.onnx`` do its parts, for accumulated gradients; ``checkpoint.safetensors`` is what
        it starts from; ``training.json`` says what is what.

        Args:
            folder: where; it is made where it is not there, and files of these names are replaced.

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
