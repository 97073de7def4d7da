"""The file ``training.json``, which describes the other files of a training step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch2ort.errors import ModelLoadError

TRAIN_STEP = "train_step.onnx"
TRAINING_MODEL = "training_model.onnx"
EVAL_MODEL = "eval_model.onnx"
OPTIMIZER_MODEL = "optimizer_model.onnx"
INFERENCE_MODEL = "inference_model.onnx"
CHECKPOINT = "checkpoint.safetensors"
DESCRIPTION = "training.json"
LEARNING_RATE, SEED, RESET = "learning_rate", "seed", "lazy_reset_grad"

_FORMAT, _VERSION = "torch2ort.training", 1


@dataclass(frozen=True)
class Tensor:
    """The expected type and shape of a tensor of a file.

    Attributes:
        dtype: NumPy's name of its type.
        shape: its sizes; a varying one is a text.
    """

    dtype: str
    shape: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.dtype} of shape ({', '.join(map(str, self.shape))})"

    def difference(self, dtype: str, shape: tuple[int, ...]) -> str | None:
        """Return ``None`` if a type and shape are as expected, else a text of them."""
        fits = len(shape) == len(self.shape) and all(
            isinstance(wanted, str) or wanted == size for wanted, size in zip(self.shape, shape, strict=True)
        )
        return None if fits and dtype == self.dtype else f"{dtype} of shape ({', '.join(map(str, shape))})"


@dataclass(frozen=True)
class Description:
    """The files of a training step.

    Attributes:
        batch: the structure of a batch: ``{"tuple": [...]}``, ``{"list": [...]}``, ``{"dict": {...}}``,
            ``{"tensor": name}`` or ``{"constant": value}``.
        inputs: the tensors of a batch by the names of the graphs' inputs.
        ranges: the smallest and the largest value of a varying size; ``None`` for no limit.
        guards: further conditions on sizes, over ``size(input, dimension)``.
        results: the names of loss and metrics.
        parameters: the trained parameters, by their names in the ``state_dict``.
        buffers: the buffers that a step changes, by their names there.
        optimizer: the optimizer's state, ``optimizer.<state>.<name>``.
        gradients: parameter -> the input with the sum of its gradients, for parameters that have gradients.
        evaluated: file -> the parameters and buffers that are its inputs, for ``eval_model.onnx`` and
            ``inference_model.onnx``.
        aliases: second names of parameters and buffers -> the first.
        feeds: file -> output -> the input of the next call that it is fed to.
        learning_rate: the initial one.
        seeded: whether a seed is an input of the steps.
        functions: qualified names of the Functions that the files call; they need torch2ort to run.
        outputs: names of the model's outputs in ``inference_model.onnx``.
        files: SHA-256 of each ONNX file, by its name.
    """

    batch: Any
    inputs: dict[str, Tensor]
    ranges: dict[str, list[int | None]]
    guards: list[str]
    results: list[str]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    gradients: dict[str, str]
    evaluated: dict[str, list[str]]
    aliases: dict[str, str]
    feeds: dict[str, dict[str, str]]
    learning_rate: float
    seeded: bool
    functions: list[str]
    outputs: list[str]
    files: dict[str, str] = field(default_factory=dict)

    @property
    def state(self) -> dict[str, Tensor]:
        """All tensors that a step changes and a checkpoint stores."""
        return {**self.parameters, **self.buffers, **self.optimizer}

    def to_json(self) -> str:
        """Return the text that :func:`parse_description` reads."""
        return json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(self)}, indent=1)


def read_description(folder: Path) -> Description:
    """Return the description in a folder's ``training.json``.

    Raises:
        ModelLoadError: the file is missing or damaged.
    """
    path = folder / DESCRIPTION
    try:
        text = path.read_text()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelLoadError(
            f"{path}: cannot be read ({reason}); expected a folder that TrainingArtifacts.save wrote"
        ) from error
    return parse_description(path, text)


def parse_description(path: Path, text: str) -> Description:
    """Return the description in a text of :meth:`Description.to_json`.

    Args:
        path: the file that contains it, for errors.
        text: the description.

    Raises:
        ModelLoadError: it is damaged.
    """
    try:
        data = json.loads(text)
        if data.pop("format") != _FORMAT:
            raise ValueError("another format")
        version = data.pop("version")
        if version != _VERSION:
            raise ModelLoadError(
                f"{path}: expected version {_VERSION}, given {version}; save the files again"
            )
        for key in ("inputs", "parameters", "buffers", "optimizer"):
            data[key] = {name: _tensor(value) for name, value in data[key].items()}
        return Description(**data)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelLoadError(
            f"{path}: not a description of a training step ({error}); expected one that "
            f"TrainingArtifacts.save wrote"
        ) from error


def _tensor(value: Mapping[str, Any]) -> Tensor:
    return Tensor(str(value["dtype"]), tuple(value["shape"]))


def read_model(folder: Path, name: str, description: Description, role: str | None = None) -> bytes:
    """Return the content of an ONNX file, checked against its hash.

    Args:
        folder: of the file.
        name: of the file.
        description: the description that was saved with it.
        role: the name under which it was saved; ``None`` if it still has that name.

    Raises:
        ModelLoadError: the file is missing, damaged or another one.
    """
    path = folder / name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelLoadError(
            f"{path}: cannot be read ({error.strerror}); expected the file that was saved with {DESCRIPTION}"
        ) from error
    expected, given = description.files.get(role or name), digest(content)
    if role is not None and given != expected and given in description.files.values():
        saved = next(saved for saved, value in description.files.items() if value == given)
        raise ModelLoadError(f"{path}: expected the file that was saved as {role}, given {saved}")
    if given != expected:
        raise ModelLoadError(
            f"{path}: damaged, or not saved with {DESCRIPTION}: expected SHA-256 {expected}, given {given}. "
            f"Save the training step again"
        )
    return content


def digest(content: bytes) -> str:
    """Return the SHA-256 of a file's content."""
    return hashlib.sha256(content).hexdigest()
