"""What ``training.json`` says of the files beside it."""

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
    """What a tensor of a file must be.

    Attributes:
        dtype: numpy's name of its type.
        shape: its sizes; one that varies is a text.
    """

    dtype: str
    shape: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.dtype} of shape ({', '.join(map(str, self.shape))})"

    def difference(self, dtype: str, shape: tuple[int, ...]) -> str | None:
        """``None``, or what was given where it does not fit."""
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
        ranges: the least and the most that a size may be that varies; ``None`` for no limit.
        guards: further conditions on sizes, over ``size(input, dimension)``.
        results: the names of loss and metrics.
        parameters: what is trained, by its name in the ``state_dict``.
        buffers: what a step changes besides, by its name there.
        optimizer: the optimizer's state, ``optimizer.<state>.<name>``.
        gradients: parameter -> the input that holds the sum of its gradients, of those that have one.
        evaluated: parameters and buffers that ``eval_model.onnx`` takes, and the other one.
        aliases: second names of parameters and buffers -> the first.
        feeds: of each file, which output is which input of the next call.
        learning_rate: the one to begin with.
        seeded: whether the steps take a seed.
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
        """All that a step changes and a checkpoint holds."""
        return {**self.parameters, **self.buffers, **self.optimizer}

    def to_json(self) -> str:
        """The text that :func:`parse_description` reads."""
        return json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(self)}, indent=1)


def read_description(folder: Path) -> Description:
    """What a folder's ``training.json`` says.

    Raises:
        ModelLoadError: it is missing or damaged.
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
    """What :meth:`Description.to_json` gave.

    Args:
        path: the file that holds it.
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
    """The content of an ONNX file, as it was saved.

    Args:
        folder: where it is.
        name: of the file.
        description: what it was saved with.
        role: the name that it was saved under; ``None`` if it has that still.

    Raises:
        ModelLoadError: it is missing or another one.
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
    """SHA-256 of a file's content."""
    return hashlib.sha256(content).hexdigest()
