"""Runs of a saved training step."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from torch2ort.artifacts import read_training_json as files
from torch2ort.artifacts import scalar_arguments
from torch2ort.artifacts.batch import BatchReader
from torch2ort.artifacts.checkpoint import Progress, read_checkpoint, write_checkpoint
from torch2ort.artifacts.model_sessions import OpenSession, SessionFactory
from torch2ort.artifacts.read_training_json import read_description, read_model
from torch2ort.artifacts.stateful_session import BoundRun, DeviceTensors, device_of, on_device
from torch2ort.artifacts.write_inference_model import write_inference_model


class TrainingSession:
    """A training session over the files that :meth:`torch2ort.TrainingArtifacts.save` wrote, without PyTorch.

    Parameters, buffers and the optimizer's state stay on the device between steps: a step reads one set of
    memory and writes another, and the next step swaps the two sets. Threads may share a session; its calls
    are serialized.

    Args:
        folder: the folder of the files.
        providers: execution providers of onnxruntime; the CPU by default.
        session_options: ``onnxruntime.SessionOptions``, such as the number of threads.
        functions: classes of ``torch.autograd.Function`` that the step calls, besides those registered with
            :func:`torch2ort.register_function`. Such a step needs PyTorch.

    Attributes:
        steps: number of completed steps; stored in checkpoints.

    Raises:
        ModelLoadError: a file is missing, damaged or not the one that was saved; names the file, the tensor,
            what was expected and what was given. Or the step calls Functions, and PyTorch is missing.
        FunctionNotFoundError: a class that the step calls was not supplied.
        RegistryError: ``functions`` is not a list of classes.
        OptionError: this onnxruntime lacks a provider, or the session options do not support Functions.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        providers: Sequence[Any] | None = None,
        *,
        session_options: Any = None,
        functions: Iterable[Any] = (),
    ) -> None:
        self._lock = threading.RLock()
        self._folder = Path(folder)
        self.description = read_description(self._folder)
        self._opener = SessionFactory(
            self.description, providers, session_options, functions, lambda: (self.seed, self.steps)
        )
        start = Progress(0, 0, self.description.learning_rate)
        arrays, progress = self._read(self._folder / files.CHECKPOINT, start)
        opened = self._opener.open(self._folder / files.TRAIN_STEP)
        device = device_of(opened.session)
        self._state = DeviceTensors(arrays, device)
        self._lr_value = on_device(np.array(progress.lr, np.float32), device)
        self._seed_value = on_device(np.zeros(2, np.int64), device)
        self._reader = BatchReader(self.description)
        self._runs = [self._run(opened, self._state.sets[i], self._state.sets[1 - i]) for i in range(2)]
        self._take(progress)

    def _run(self, opened: OpenSession, read: dict[str, Any], written: dict[str, Any]) -> BoundRun:
        given = {**read, files.LEARNING_RATE: self._lr_value, files.SEED: self._seed_value}
        feeds = self.description.feeds[files.TRAIN_STEP]
        outputs = {output: written[name] for output, name in feeds.items()}
        return opened.run(given, outputs, self.description.results)

    def step(self, batch: Any) -> dict[str, Any]:
        """Train on one batch.

        Args:
            batch: nested like the sample, with NumPy arrays of its dtypes and shapes (except for varying
                sizes).

        Returns:
            ``"loss"`` and each metric: a float, or an array if it is not a single number.

        Raises:
            SchemaMismatchError: the batch differs from the sample.
            EngineError: onnxruntime failed. An exception of a Function is propagated unchanged. The state is
                not changed then.
        """
        arrays = self._reader.read(batch)
        with self._lock:
            if self.description.seeded:
                self._seed_value.update_inplace(np.array([self.seed, self.steps], np.int64))
            found = self._runs[self._state.current](arrays)
            self._state.current ^= 1
            self.steps += 1
        return found

    def evaluate(self, batch: Any) -> dict[str, Any]:
        """Compute loss and metrics of one batch in evaluation mode, without changing the state.

        Args:
            batch: as for :meth:`step`.

        Raises:
            SchemaMismatchError: the batch differs from the sample.
            EngineError: onnxruntime failed.
        """
        arrays = self._reader.read(batch)
        with self._lock:
            return self._evaluations[self._state.current](arrays)

    @cached_property
    def _evaluations(self) -> list[BoundRun]:
        opened = self._opener.open(self._folder / files.EVAL_MODEL)
        return [opened.run(values, {}, self.description.results) for values in self._state.sets]

    @property
    def lr(self) -> float:
        """The learning rate of the next step; stored in checkpoints."""
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        rate = scalar_arguments.learning_rate("lr", value)
        with self._lock:
            self._lr = rate
            self._lr_value.update_inplace(np.array(rate, np.float32))

    @property
    def seed(self) -> int:
        """The seed of random operators; stored in checkpoints."""
        return self._seed

    @seed.setter
    def seed(self, value: int) -> None:
        self._seed = scalar_arguments.seed(value)

    def parameters(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return copies of the trained parameters, by their names in the ``state_dict``."""
        with self._lock:
            values = self._state.values()
            return {name: np.array(values[name].numpy()) for name in self.description.parameters}

    def save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Write parameters, buffers, optimizer state, learning rate, seed and number of steps to a file.

        Args:
            path: a safetensors file; an existing one is replaced, atomically.

        Raises:
            OSError: it cannot be written.
        """
        with self._lock:
            progress = Progress(self.steps, self.seed, self.lr, self._properties)
            arrays = self._state.arrays()
        write_checkpoint(path, arrays, self.description, progress)

    def load_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Restore the state that :meth:`save_checkpoint` wrote, bitwise.

        Raises:
            ModelLoadError: the file is damaged, or of another training step. The state is not changed then.
        """
        arrays, progress = self._read(path, Progress(self.steps, self.seed, self.lr))
        with self._lock:
            self._state.load(arrays)
            self._take(progress)

    def export_for_inference(self, path: str | os.PathLike[str]) -> None:
        """Write the model with its current parameters, without loss, to an ONNX file.

        Args:
            path: the file; an existing one is replaced.

        Raises:
            OSError: it cannot be written.
        """
        content = read_model(self._folder, files.INFERENCE_MODEL, self.description)
        names = self.description.evaluated[files.INFERENCE_MODEL]
        with self._lock:
            values = self._state.values()
            arrays = {name: np.array(values[name].numpy()) for name in names}
        write_inference_model(path, content, arrays)

    def _read(self, path: str | os.PathLike[str], start: Progress) -> tuple[Any, Progress]:
        return read_checkpoint(path, self.description.state, self.description.aliases, start)

    def _take(self, progress: Progress) -> None:
        self.steps, self.seed, self.lr = progress.step, progress.seed, progress.lr
        self._properties = progress.properties
