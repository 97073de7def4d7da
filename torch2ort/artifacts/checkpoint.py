"""Checkpoints: parameters, buffers and the optimizer's state in one safetensors file."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from torch2ort.artifacts import scalar_arguments
from torch2ort.artifacts.atomic_write import replacing
from torch2ort.artifacts.checkpoint_parameters import Properties, Property
from torch2ort.artifacts.read_training_json import Description, Tensor, parse_description
from torch2ort.errors import ModelLoadError

Arrays = dict[str, np.ndarray[Any, Any]]

_DESCRIPTION = "training_step"


@dataclass(frozen=True)
class Progress:
    """The progress of a training.

    Attributes:
        step: number of completed steps.
        seed: seed of the random numbers.
        lr: the learning rate.
        properties: numbers and texts of the user.
    """

    step: int
    seed: int
    lr: float
    properties: Mapping[str, Property] = field(default_factory=dict)


def write_checkpoint(
    path: str | os.PathLike[str], arrays: Mapping[str, Any], description: Description, progress: Progress
) -> None:
    """Write a checkpoint, atomically.

    Args:
        path: the file.
        arrays: name -> array.
        description: of the training step; the file contains it, so that it can be read from any folder. An
            array with aliases is also written under these.
        progress: the progress of the training.

    Raises:
        OSError: it cannot be written.
    """
    # reshape removes the axis that ascontiguousarray adds to a scalar.
    found = {name: np.ascontiguousarray(value).reshape(np.shape(value)) for name, value in arrays.items()}
    found.update({alias: found[name] for alias, name in description.aliases.items() if name in found})
    checks = {name: zlib.crc32(value.tobytes()) for name, value in found.items()}
    metadata = {
        "step": str(progress.step),
        "seed": str(progress.seed),
        "learning_rate": repr(progress.lr),
        "properties": json.dumps(dict(progress.properties)),
        "crc32": json.dumps(checks),
        _DESCRIPTION: description.to_json(),
    }
    with replacing(path) as file:
        try:
            safetensors.numpy.save_file(found, str(file), metadata)
        except safetensors.SafetensorError as error:
            raise OSError(f"{path}: the checkpoint cannot be written ({error})") from error


def description_in(path: Path) -> Description | None:
    """Return the description in a checkpoint; ``None`` if it contains none, or cannot be read.

    Raises:
        ModelLoadError: the description is damaged.
    """
    try:
        with safetensors.safe_open(str(path), framework="numpy") as file:
            text = (file.metadata() or {}).get(_DESCRIPTION)
    except (safetensors.SafetensorError, OSError, ValueError, TypeError):
        return None
    return None if text is None else parse_description(path, text)


def read_checkpoint(
    path: str | os.PathLike[str], expected: Mapping[str, Tensor], aliases: Mapping[str, str], start: Progress
) -> tuple[Arrays, Progress]:
    """Read a checkpoint.

    Args:
        path: the file.
        expected: name -> expected type and shape of the tensor.
        aliases: second names of tensors, which the file may contain.
        start: the progress for a file without one.

    Raises:
        ModelLoadError: the file is damaged, or not of this training step; names the tensor, what was expected
            and what was given.
    """
    try:
        with safetensors.safe_open(str(path), framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path}: there is no such file; expected a checkpoint") from error
    except (safetensors.SafetensorError, OSError, ValueError, TypeError) as error:
        raise ModelLoadError(
            f"{path}: damaged, or not a checkpoint ({error}); expected a safetensors file"
        ) from error
    _check(path, arrays, expected, aliases)
    try:
        checks = json.loads(metadata.get("crc32", "{}"))
        properties = json.loads(metadata.get("properties", "{}"))
        if not isinstance(checks, dict) or not isinstance(properties, dict):
            raise ValueError("expected CRC-32 and properties by names")
        progress = Progress(
            int(metadata.get("step", start.step)),
            scalar_arguments.seed(int(metadata.get("seed", start.seed))),
            scalar_arguments.learning_rate("learning_rate", float(metadata.get("learning_rate", start.lr))),
            dict(Properties(properties)),
        )
    except ValueError as error:
        raise ModelLoadError(
            f"{path}: damaged: its metadata is not that of a checkpoint ({error})"
        ) from error
    for name, check in checks.items():
        if name in arrays and zlib.crc32(arrays[name].tobytes()) != check:
            given = zlib.crc32(arrays[name].tobytes())
            raise ModelLoadError(
                f"{path}: damaged: tensor {name!r} was expected to have CRC-32 {check}, given {given}"
            )
    return {name: arrays[name] for name in expected}, progress


def _check(
    path: str | os.PathLike[str],
    arrays: Arrays,
    expected: Mapping[str, Tensor],
    aliases: Mapping[str, str],
) -> None:
    for name, wanted in expected.items():
        if name not in arrays:
            raise ModelLoadError(f"{path}: has no tensor {name!r}; expected {wanted}")
        given = wanted.difference(arrays[name].dtype.name, arrays[name].shape)
        if given is not None:
            raise ModelLoadError(f"{path}: tensor {name!r}: expected {wanted}, given {given}")
    unknown = sorted(arrays.keys() - expected.keys() - aliases.keys())
    if unknown:
        given = f"{arrays[unknown[0]].dtype.name} of shape {arrays[unknown[0]].shape}"
        raise ModelLoadError(
            f"{path}: tensor {unknown[0]!r}: expected no tensor of that name, given {given}; it is a "
            f"checkpoint of another training step"
        )
